/* Scores of an indexer, and the best of them, with the GIL released.
 *
 * Owns the inner loops of common_votes.py and common_topk.py and nothing else: what they mean, and
 * the same in torch, is there, to the last bit but for the sign of a zero and the payload of a NaN,
 * by which nothing is chosen. Dot products are exact, so that their order and the width of a vector
 * mean nothing; what is rounded is rounded in torch's order, which is why this file is compiled with
 * -ffp-contract=off. Places are checked here, because a wrong one would be an address.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include "../../core/_arrays.h"

enum { LANES = 8, BLOCKS = 4 }; /* keys that are scored side by side; read before any is scored: */
/* what is stored a lane at a time and loaded whole at once would wait for the stores */
typedef double Lanes __attribute__((vector_size(LANES * sizeof(double))));
typedef int64_t Masks __attribute__((vector_size(LANES * sizeof(int64_t))));

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDEST __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define WIDEST
#endif
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const double *query;   /* [queries, heads, dim], on their grid */
    const double *weights; /* [queries, heads] */
    const char *pool;      /* [pool_rows, dim] of bfloat16 or float32 */
    const int64_t *rows;   /* [queries, keys] */
    float *found;          /* [queries, keys] */
    Py_ssize_t queries, heads, dim, keys, pool_rows, item;
    double unit;  /* of a grid, beside a row's power of two */
    double *key;  /* scratch [dim] */
    Lanes *block; /* scratch [BLOCKS, dim] */
    Lanes *terms; /* scratch [heads] */
} Votes;

/* A row as float64, and its largest magnitude as the bits of a float32; NaN is above all. */
INLINE uint32_t widened(const char *row, Py_ssize_t dim, Py_ssize_t item, double *out)
{
    uint32_t largest = 0;
    for (Py_ssize_t i = 0; i < dim; i++) {
        uint32_t bits;
        float value;
        if (item == 2) {
            uint16_t narrow;
            memcpy(&narrow, row + 2 * i, 2);
            bits = (uint32_t)narrow << 16;
        } else {
            memcpy(&bits, row + 4 * i, 4);
        }
        memcpy(&value, &bits, 4);
        out[i] = value;
        bits &= 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* As `on_grid` in common_exact.py. */
INLINE void read_key(const Votes *votes, const char *row, double *block)
{
    double *key = votes->key, power;
    float magnitude;
    uint64_t bits;
    const uint32_t largest = votes->item == 2 ? widened(row, votes->dim, 2, key)
                                              : widened(row, votes->dim, 4, key);
    memcpy(&magnitude, &largest, 4);
    power = magnitude;
    memcpy(&bits, &power, 8);
    bits &= 0x7FF0000000000000u;
    memcpy(&power, &bits, 8);
    const double coarse = power * votes->unit;
    for (Py_ssize_t i = 0; i < votes->dim; i++)
        block[i * LANES] = (key[i] + coarse) - coarse;
}

/* weight * relu(dot); what is no number stays none. */
INLINE void vote(const Lanes *dot, double weight, Lanes *term)
{
    *term = (Lanes)((Masks)*dot & ~(Masks)(*dot < 0)) * weight;
}

INLINE void read_votes(const Votes *votes, const Lanes *block, const double *query,
                       const double *weights)
{
    const Py_ssize_t dim = votes->dim;
    Py_ssize_t head = 0;
    for (; head + 4 <= votes->heads; head += 4) {
        const double *q = query + head * dim;
        Lanes a = {0}, b = {0}, c = {0}, d = {0};
        for (Py_ssize_t i = 0; i < dim; i++) {
            const Lanes key = block[i];
            a += key * q[i];
            b += key * q[dim + i];
            c += key * q[2 * dim + i];
            d += key * q[3 * dim + i];
        }
        vote(&a, weights[head], &votes->terms[head]);
        vote(&b, weights[head + 1], &votes->terms[head + 1]);
        vote(&c, weights[head + 2], &votes->terms[head + 2]);
        vote(&d, weights[head + 3], &votes->terms[head + 3]);
    }
    for (; head < votes->heads; head++) {
        Lanes sum = {0};
        for (Py_ssize_t i = 0; i < dim; i++)
            sum += block[i] * query[head * dim + i];
        vote(&sum, weights[head], &votes->terms[head]);
    }
}

/* As `folded` in common_exact.py. */
INLINE void fold(Lanes *terms, Py_ssize_t count)
{
    while (count > 1) {
        const Py_ssize_t half = count / 2;
        for (Py_ssize_t i = 0; i < half; i++)
            terms[i] += terms[count - half + i];
        count -= half;
    }
}

/* Up to BLOCKS * LANES keys of a query; lanes without one repeat the first. 0 where a row lies
 * outside of the pool. */
INLINE int read_keys(const Votes *votes, const int64_t *rows, Py_ssize_t count)
{
    const size_t row_bytes = (size_t)(votes->dim * votes->item);
    for (Py_ssize_t at = 0; at < count; at += LANES) {
        double *block = (double *)(votes->block + at / LANES * votes->dim);
        for (Py_ssize_t lane = 0; lane < LANES; lane++) {
            const int64_t row = rows[at + lane < count ? at + lane : 0];
            if ((uint64_t)row >= (uint64_t)votes->pool_rows)
                return 0;
            read_key(votes, votes->pool + (size_t)row * row_bytes, block + lane);
        }
    }
    return 1;
}

INLINE void score_keys(const Votes *votes, Py_ssize_t query, Py_ssize_t at, Py_ssize_t count)
{
    float *found = votes->found + query * votes->keys + at;
    for (Py_ssize_t from = 0; from < count; from += LANES) {
        read_votes(votes, votes->block + from / LANES * votes->dim,
                   votes->query + query * votes->heads * votes->dim,
                   votes->weights + query * votes->heads);
        fold(votes->terms, votes->heads);
        for (Py_ssize_t lane = 0; lane < LANES && from + lane < count; lane++)
            found[from + lane] = (float)votes->terms[0][lane];
    }
}

WIDEST static int score(const Votes *votes)
{
    for (Py_ssize_t query = 0; query < votes->queries; query++) {
        const int64_t *rows = votes->rows + query * votes->keys;
        for (Py_ssize_t at = 0; at < votes->keys; at += BLOCKS * LANES) {
            const Py_ssize_t left = votes->keys - at;
            const Py_ssize_t count = left < BLOCKS * LANES ? left : BLOCKS * LANES;
            if (!read_keys(votes, rows + at, count))
                return 0;
            score_keys(votes, query, at, count);
        }
    }
    return 1;
}

/* Whole numbers in the order of the floats: zeros are one number, NaN is as high as infinity. */
INLINE uint32_t order_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u)
        bits = 0x7F800000u;
    if (bits == 0x80000000u)
        bits = 0;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

enum { DIGIT_BITS = 11, DIGITS = 3, BUCKETS = 1 << DIGIT_BITS };

/* The k-th highest of `keys`, and into `room` how many like it belong to the k. */
static uint32_t least_of_best(const uint32_t *keys, Py_ssize_t count, Py_ssize_t *room)
{
    uint32_t found = 0, known = 0;
    for (int digit = DIGITS - 1; digit >= 0; digit--) {
        Py_ssize_t counts[BUCKETS] = {0};
        const int shift = digit * DIGIT_BITS;
        const uint32_t mask = (uint32_t)(BUCKETS - 1) << shift;
        int bucket = BUCKETS - 1;
        for (Py_ssize_t i = 0; i < count; i++)
            counts[(keys[i] & mask) >> shift] += (keys[i] & known) == found;
        while (counts[bucket] < *room)
            *room -= counts[bucket--];
        found |= (uint32_t)bucket << shift;
        known |= mask;
    }
    return found;
}

static void choose(const float *scores, Py_ssize_t count, Py_ssize_t k, uint32_t *keys,
                   int64_t *places)
{
    Py_ssize_t room = k, chosen = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        keys[i] = order_of(scores[i]);
    const uint32_t least = least_of_best(keys, count, &room);
    for (Py_ssize_t i = 0; i < count && chosen < k; i++) {
        const int equal = keys[i] == least;
        places[chosen] = i;
        chosen += keys[i] > least || (equal && room > 0);
        room -= equal;
    }
}

enum { MOST_ARRAYS = 5 };

enum { QUERY, WEIGHTS, POOL, ROWS, FOUND };

static const Expected of_votes[] = {{8, 3, 0, "query"},
                                    {8, 2, 0, "weights"},
                                    {0, 2, 0, "pool"},
                                    {8, 2, 0, "rows"},
                                    {4, 2, 1, "found"}};

static int votes_fit(const Py_buffer *views)
{
    const Py_ssize_t *query = views[QUERY].shape, *weights = views[WEIGHTS].shape;
    const Py_ssize_t *rows = views[ROWS].shape, *found = views[FOUND].shape;
    return weights[0] == query[0] && rows[0] == query[0] && found[0] == query[0]
           && weights[1] == query[1] && query[1] >= 1 && query[2] >= 1
           && views[POOL].shape[1] == query[2] && found[1] == rows[1];
}

static int run_votes(const Py_buffer *views, double unit)
{
    const Py_ssize_t *query = views[QUERY].shape;
    if (!votes_fit(views)) {
        PyErr_SetString(PyExc_ValueError, "arrays of shapes that do not belong together");
        return -1;
    }
    Votes votes = {
        .query = views[QUERY].buf, .weights = views[WEIGHTS].buf, .pool = views[POOL].buf,
        .rows = views[ROWS].buf, .found = views[FOUND].buf, .queries = query[0],
        .heads = query[1], .dim = query[2], .keys = views[ROWS].shape[1],
        .pool_rows = views[POOL].shape[0], .item = views[POOL].itemsize, .unit = unit,
    };
    const size_t lanes = (size_t)(BLOCKS * votes.dim + votes.heads);
    char *scratch = PyMem_Malloc((lanes + 1) * sizeof(Lanes) + (size_t)votes.dim * sizeof(double));
    if (scratch == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    votes.block = (Lanes *)(((uintptr_t)scratch + sizeof(Lanes) - 1) & ~(sizeof(Lanes) - 1));
    votes.terms = votes.block + BLOCKS * votes.dim;
    votes.key = (double *)(votes.terms + votes.heads);
    int right;
    Py_BEGIN_ALLOW_THREADS
    right = score(&votes);
    Py_END_ALLOW_THREADS
    PyMem_Free(scratch);
    if (!right)
        PyErr_SetString(PyExc_IndexError, "a row outside of the pool");
    return right ? 0 : -1;
}

static PyObject *votes_into(PyObject *module, PyObject *args)
{
    PyObject *objects[MOST_ARRAYS];
    Py_buffer views[MOST_ARRAYS];
    double unit;

    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOd", &objects[0], &objects[1], &objects[2], &objects[3],
                          &objects[4], &unit)
        || open_arrays(objects, views, of_votes, MOST_ARRAYS) < 0)
        return NULL;
    const int failed = run_votes(views, unit) < 0;
    close_arrays(views, MOST_ARRAYS);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static const Expected of_best[] = {{4, 2, 0, "scores"}, {8, 2, 1, "places"}};

static int run_best(const Py_buffer *scores, const Py_buffer *places)
{
    const Py_ssize_t count = scores->shape[1], k = places->shape[1];
    if (scores->shape[0] != places->shape[0] || k < 1 || k > count) {
        PyErr_SetString(PyExc_ValueError, "places for each row of scores, and no more than it has");
        return -1;
    }
    uint32_t *keys = PyMem_Malloc((size_t)count * sizeof(uint32_t));
    if (keys == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t row = 0; row < scores->shape[0]; row++)
        choose((const float *)scores->buf + row * count, count, k, keys,
               (int64_t *)places->buf + row * k);
    Py_END_ALLOW_THREADS
    PyMem_Free(keys);
    return 0;
}

static PyObject *best_into(PyObject *module, PyObject *args)
{
    PyObject *objects[2];
    Py_buffer views[2];

    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &objects[0], &objects[1])
        || open_arrays(objects, views, of_best, 2) < 0)
        return NULL;
    const int failed = run_best(&views[0], &views[1]) < 0;
    close_arrays(views, 2);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"votes_into", votes_into, METH_VARARGS,
     "votes_into(query, weights, pool, rows, found, unit)\n\n"
     "Fills found. pool: the bits of bfloat16, or float32. IndexError for a row outside of it."},
    {"best_into", best_into, METH_VARARGS,
     "best_into(scores, places)\n\nFills places, ascending: as many of the highest as there is "
     "room for, of equal ones the first."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_scores", "Scores of an indexer.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__scores(void)
{
    return PyModule_Create(&definition);
}
