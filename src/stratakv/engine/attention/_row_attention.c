/* Attention of one-token queries over float32 pages where they lie, with the GIL released.
 *
 * Owns the inner loops of compiled_row_kernels.py and nothing else. A query's result depends on its
 * own row of the table and its own keys alone, and is the same to the bit with vectors of any
 * width: sums run over 16 lanes whatever the processor has, and this file is compiled with
 * -ffp-contract=off. Places are checked here, because a wrong one would be an address.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include "../../core/_arrays.h"
#include "../_lanes.h"

enum { SIDE = 4 };     /* queries that read a value together; vectors of it at once */
enum { STRETCH = 64 }; /* tokens whose values are read for all heads before the next */
typedef struct {
    const float *query;     /* [queries, heads, key_dim] */
    const float *keys;      /* [rows, kv_heads * key_dim] */
    const float *values;    /* [rows, kv_heads * value_dim] */
    const int32_t *table;   /* [table_rows, width] */
    const int64_t *spans;   /* [queries, 3]: row of the table, first and last token that is seen */
    const float *sinks;     /* [heads], or NULL */
    float *out;             /* [queries, heads, value_dim] */
    Py_ssize_t queries, heads, kv_heads, key_dim, value_dim, width, page_tokens;
    float scale, softcap;   /* softcap 0: none */
    Py_ssize_t count, room; /* tokens that the query sees; room for so many, in whole LANES */
    float *scores;          /* scratch [heads, room] */
    float *totals;          /* scratch [heads]: of the weights */
    int64_t *rows;          /* scratch [room]: of the pools, those of the tokens that are seen */
} Step;

/* What is read next, to a cache that has more reads under way than the first one. */
INLINE void expect(const Step *step, const float *pool, Py_ssize_t at, Py_ssize_t dim,
                   Py_ssize_t from, Py_ssize_t to)
{
    for (Py_ssize_t token = at; token < at + LANES && token < step->count; token++)
        for (Py_ssize_t column = from * dim; column < to * dim; column += LANES)
            __builtin_prefetch(pool + step->rows[token] * step->kv_heads * dim + column, 0, 2);
}

/* Scores of LANES tokens from `at` on for the heads of one key head; lanes without a token repeat
 * the last. */
INLINE void score_lanes(const Step *step, const float *query, Py_ssize_t kv_head, Py_ssize_t at)
{
    const Py_ssize_t dim = step->key_dim, whole = dim / LANES * LANES;
    const Py_ssize_t group = step->heads / step->kv_heads;
    const float *keys[LANES];
    for (int i = 0; i < LANES; i++) {
        const Py_ssize_t token = at + i < step->count ? at + i : step->count - 1;
        keys[i] = step->keys + (step->rows[token] * step->kv_heads + kv_head) * dim;
    }
    for (Py_ssize_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        const float *asks = query + head * dim;
        Lanes sums[LANES] = {{0}};
        for (Py_ssize_t column = 0; column < whole; column += LANES) {
            const Lanes asked = *(const Loose *)(asks + column);
            for (int i = 0; i < LANES; i++)
                sums[i] += asked * *(const Loose *)(keys[i] + column);
        }
        if (whole < dim) {
            const Lanes asked = loaded(asks + whole, dim - whole);
            for (int i = 0; i < LANES; i++)
                sums[i] += asked * loaded(keys[i] + whole, dim - whole);
        }
        *(Loose *)(step->scores + head * step->room + at) = sums_of(sums) * step->scale;
    }
}

/* Scores become weights that are still to be divided by the sum, which is returned. */
INLINE float weigh(const Step *step, float *scores, Py_ssize_t head)
{
    const Py_ssize_t count = step->count;
    if (step->softcap != 0)
        for (Py_ssize_t i = 0; i < count; i++)
            scores[i] = tanhf(scores[i] / step->softcap) * step->softcap;
    for (Py_ssize_t i = count; i < step->room && i % LANES; i++)
        scores[i] = -INFINITY;
    Lanes most = {0}, sums[LANES] = {{0}};
    most += step->sinks ? step->sinks[head] : -INFINITY;
    for (Py_ssize_t i = 0; i < count; i += LANES) {
        const Lanes some = *(Loose *)(scores + i);
        const Words more = some > most;
        most = (Lanes)(((Words)some & more) | ((Words)most & ~more));
    }
    for (int i = 1; i < LANES; i++)
        most[0] = most[i] > most[0] ? most[i] : most[0];
    for (Py_ssize_t i = 0; i < count; i += LANES) {
        const Lanes weights = exps(*(Loose *)(scores + i) - most[0]);
        *(Loose *)(scores + i) = weights;
        sums[0] += weights;
    }
    if (step->sinks)
        sums[1][0] = exps(sums[1] + (step->sinks[head] - most[0]))[0];
    const Lanes sum = sums_of(sums);
    return sum[0] + sum[1];
}

/* Adds values of the tokens [from, to), `blocks` vectors of each, to what `side` heads have read. */
INLINE void read_columns(const Step *step, const float *values, const float *weights, float *out,
                         Py_ssize_t from, Py_ssize_t to, const int side, const int blocks)
{
    const Py_ssize_t stride = step->kv_heads * step->value_dim;
    Lanes sums[SIDE][SIDE];
    for (int q = 0; q < side; q++)
        for (int block = 0; block < blocks; block++)
            sums[q][block] = *(Loose *)(out + q * step->value_dim + block * LANES);
    for (Py_ssize_t token = from; token < to; token++) {
        const float *value = values + step->rows[token] * stride;
        for (int block = 0; block < blocks; block++) {
            const Lanes some = *(const Loose *)(value + block * LANES);
            for (int q = 0; q < side; q++)
                sums[q][block] += some * weights[q * step->room + token];
        }
    }
    for (int q = 0; q < side; q++)
        for (int block = 0; block < blocks; block++)
            *(Loose *)(out + q * step->value_dim + block * LANES) = sums[q][block];
}

INLINE void read_values(const Step *step, Py_ssize_t head, float *out, Py_ssize_t from,
                        Py_ssize_t to, const int side)
{
    const Py_ssize_t dim = step->value_dim, kv_head = head / (step->heads / step->kv_heads);
    const float *values = step->values + kv_head * dim, *weights = step->scores + head * step->room;
    Py_ssize_t column = 0;
    out += head * dim;
    for (; column + SIDE * LANES <= dim; column += SIDE * LANES)
        read_columns(step, values + column, weights, out + column, from, to, side, SIDE);
    for (; column + LANES <= dim; column += LANES)
        read_columns(step, values + column, weights, out + column, from, to, side, 1);
    for (; column < dim; column++)
        for (int q = 0; q < side; q++)
            for (Py_ssize_t token = from; token < to; token++)
                out[q * dim + column] += values[step->rows[token] * step->kv_heads * dim + column]
                                         * weights[q * step->room + token];
}

INLINE void read_stretch(const Step *step, float *out, Py_ssize_t head, Py_ssize_t heads,
                         Py_ssize_t from, Py_ssize_t to)
{
    const Py_ssize_t group = step->heads / step->kv_heads;
    for (Py_ssize_t left; head < heads; head += left < SIDE ? left : SIDE) {
        left = group - head % group;
        switch (left) {
        case 1: read_values(step, head, out, from, to, 1); break;
        case 2: read_values(step, head, out, from, to, 2); break;
        case 3: read_values(step, head, out, from, to, 3); break;
        default: read_values(step, head, out, from, to, SIDE);
        }
    }
}

static void find_rows(Step *step, const int64_t *span)
{
    const int32_t *pages = step->table + span[0] * step->width;
    const int64_t size = step->page_tokens;
    step->count = span[2] - span[1] + 1;
    for (Py_ssize_t at = 0; at < step->count;) {
        const int64_t inside = (span[1] + at) % size;
        const int64_t row = pages[(span[1] + at) / size] * size + inside;
        for (int64_t i = 0; i < size - inside && at < step->count; i++)
            step->rows[at++] = row + i;
    }
}

/* What key heads [from, to) of query `at` read. */
INLINE void attend_query(Step *step, Py_ssize_t at, Py_ssize_t from, Py_ssize_t to)
{
    const Py_ssize_t dim = step->value_dim, group = step->heads / step->kv_heads;
    float *out = step->out + at * step->heads * dim;
    find_rows(step, step->spans + 3 * at);
    for (Py_ssize_t token = 0; token < step->count; token += LANES) {
        expect(step, step->keys, token + LANES, step->key_dim, from, to);
        for (Py_ssize_t kv_head = from; kv_head < to; kv_head++)
            score_lanes(step, step->query + at * step->heads * step->key_dim, kv_head, token);
    }
    from *= group;
    to *= group;
    for (Py_ssize_t head = from; head < to; head++)
        step->totals[head] = weigh(step, step->scores + head * step->room, head);
    memset(out + from * dim, 0, (size_t)((to - from) * dim) * sizeof(float));
    for (Py_ssize_t token = 0; token < step->count; token += STRETCH) {
        const Py_ssize_t end = token + STRETCH < step->count ? token + STRETCH : step->count;
        for (Py_ssize_t next = end; next < end + STRETCH; next += LANES)
            expect(step, step->values, next, dim, from / group, to / group);
        read_stretch(step, out, from, to, token, end);
    }
    for (Py_ssize_t i = from * dim; i < to * dim; i++)
        out[i] /= step->totals[i / dim];
}

/* Key heads [from, to) of all queries, one query's after the other's. */
WIDEST static void attend(Step *step, Py_ssize_t from, Py_ssize_t to)
{
    const Py_ssize_t kv_heads = step->kv_heads;
    for (Py_ssize_t at = from / kv_heads; at * kv_heads < to; at++) {
        const Py_ssize_t low = from - at * kv_heads, high = to - at * kv_heads;
        attend_query(step, at, low > 0 ? low : 0, high < kv_heads ? high : kv_heads);
    }
}

enum { QUERY, KEYS, VALUES, TABLE, SPANS, OUT, SINKS, ARRAYS };

static const Expected of_step[ARRAYS] = {
    {4, 3, 0, "query"}, {4, 2, 0, "keys"}, {4, 2, 0, "values"}, {4, 2, 0, "table"},
    {8, 2, 0, "spans"}, {4, 3, 1, "out"},  {4, 1, 0, "sinks"},
};

static int shapes_fit(const Step *step, const Py_buffer *views, const Py_buffer *sinks)
{
    return step->key_dim > 0 && step->value_dim > 0 && step->kv_heads > 0 && step->page_tokens > 0
           && step->heads % step->kv_heads == 0
           && views[KEYS].shape[1] == step->kv_heads * step->key_dim
           && views[VALUES].shape[1] == step->kv_heads * step->value_dim
           && views[KEYS].shape[0] == views[VALUES].shape[0]
           && views[SPANS].shape[0] == step->queries && views[SPANS].shape[1] == 3
           && views[OUT].shape[0] == step->queries && views[OUT].shape[1] == step->heads
           && (sinks == NULL || sinks->shape[0] == step->heads);
}

/* The most tokens that a query sees; -1 where one would read outside of the table or the pools. */
static Py_ssize_t longest(const Step *step, Py_ssize_t table_rows, Py_ssize_t pages)
{
    Py_ssize_t most = 0;
    for (Py_ssize_t at = 0; at < step->queries; at++) {
        const int64_t *span = step->spans + 3 * at;
        if (span[0] < 0 || span[0] >= table_rows || span[1] < 0 || span[2] < span[1]
            || span[2] / step->page_tokens >= step->width)
            return -1;
        const int32_t *row = step->table + span[0] * step->width;
        for (Py_ssize_t page = span[1] / step->page_tokens; page <= span[2] / step->page_tokens;
             page++)
            if (row[page] < 0 || row[page] >= pages)
                return -1;
        most = span[2] - span[1] + 1 > most ? span[2] - span[1] + 1 : most;
    }
    return most;
}

typedef struct {
    Py_ssize_t kv_heads, page_tokens, from, to;
    float scale, softcap;
} Asked;

static int run_step(const Py_buffer *views, const Py_buffer *sinks, const Asked *asked)
{
    Step step = {
        .query = views[QUERY].buf, .keys = views[KEYS].buf, .values = views[VALUES].buf,
        .table = views[TABLE].buf, .spans = views[SPANS].buf, .out = views[OUT].buf,
        .sinks = sinks ? sinks->buf : NULL, .queries = views[QUERY].shape[0],
        .heads = views[QUERY].shape[1], .kv_heads = asked->kv_heads,
        .key_dim = views[QUERY].shape[2], .value_dim = views[OUT].shape[2],
        .width = views[TABLE].shape[1], .page_tokens = asked->page_tokens, .scale = asked->scale,
        .softcap = asked->softcap,
    };
    if (!shapes_fit(&step, views, sinks) || asked->from < 0 || asked->from > asked->to
        || asked->to > step.queries * step.kv_heads) {
        PyErr_SetString(PyExc_ValueError, "arrays of shapes that do not belong together");
        return -1;
    }
    const Py_ssize_t most = longest(&step, views[TABLE].shape[0],
                                    views[KEYS].shape[0] / asked->page_tokens);
    if (most < 0) {
        PyErr_SetString(PyExc_IndexError, "a page outside of the pool");
        return -1;
    }
    step.room = (most + LANES - 1) / LANES * LANES;
    const size_t floats = (size_t)(step.heads * (step.room + 1));
    step.rows = PyMem_Malloc((size_t)step.room * sizeof(int64_t) + floats * sizeof(float));
    step.scores = (float *)(step.rows + step.room);
    step.totals = step.scores + step.heads * step.room;
    if (step.rows == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    attend(&step, asked->from, asked->to);
    Py_END_ALLOW_THREADS
    PyMem_Free(step.rows);
    return 0;
}

static PyObject *attend_into(PyObject *module, PyObject *args)
{
    PyObject *objects[ARRAYS];
    Py_buffer views[ARRAYS];
    Asked asked;

    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOOnnffnn", &objects[QUERY], &objects[KEYS], &objects[VALUES],
                          &objects[TABLE], &objects[SPANS], &objects[OUT], &objects[SINKS],
                          &asked.kv_heads, &asked.page_tokens, &asked.scale, &asked.softcap,
                          &asked.from, &asked.to))
        return NULL;
    const int count = objects[SINKS] == Py_None ? SINKS : ARRAYS;
    if (open_arrays(objects, views, of_step, count) < 0)
        return NULL;
    const int failed = run_step(views, count == ARRAYS ? &views[SINKS] : NULL, &asked) < 0;
    close_arrays(views, count);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"attend_into", attend_into, METH_VARARGS,
     "attend_into(query, keys, values, table, spans, out, sinks, kv_heads, page_tokens, scale, "
     "softcap, from, to)\n\nFills what key heads [from, to) of all queries in a row read. sinks: None "
     "for none; softcap: 0 for none. IndexError for a page outside of the pool."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_row_attention", "Attention over pages where they lie.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__row_attention(void)
{
    return PyModule_Create(&definition);
}
