/* One token on the states of linear attention, in float32, with the GIL released.
 *
 * Owns the inner loops of compiled_state_steps.py and nothing else; what they compute is Hugging
 * Face's, one pass over a state in place of six. A request's result depends on its own state and
 * inputs alone, and is the same to the bit with vectors of any width.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>

#include "../../core/_arrays.h"
#include "../_lanes.h"

typedef struct {
    float *state;         /* [requests, heads, head_dim, size] */
    const float *inputs;  /* [requests, heads, head_dim] */
    const float *dt;      /* [requests, heads] */
    const float *decay;   /* [heads] */
    const float *b, *c;   /* [requests, groups, size] */
    const float *skip;    /* [heads] */
    float *out;           /* [requests, heads, head_dim] */
    Py_ssize_t requests, heads, groups, head_dim, size;
} Mamba;

/* Rows [from, from + LANES) of a head's state, or as many as there are. */
INLINE void mamba_rows(const Mamba *step, float *state, const float *inputs, const float *b,
                       const float *c, float dt, float decay, float *out, Py_ssize_t rows)
{
    const Py_ssize_t size = step->size;
    Lanes sums[LANES] = {{0}};
    for (Py_ssize_t row = 0; row < rows; row++, state += size) {
        Py_ssize_t at = 0;
        for (; at + LANES <= size; at += LANES) {
            const Lanes new = *(Loose *)(state + at) * decay
                              + *(const Loose *)(b + at) * dt * inputs[row];
            *(Loose *)(state + at) = new;
            sums[row] += new * *(const Loose *)(c + at);
        }
        if (at < size) {
            const size_t rest = (size_t)(size - at);
            const Lanes new = loaded(state + at, rest) * decay + loaded(b + at, rest) * dt * inputs[row];
            memcpy(state + at, &new, rest * sizeof(float));
            sums[row] += new * loaded(c + at, rest);
        }
    }
    const Lanes found = sums_of(sums);
    memcpy(out, &found, (size_t)rows * sizeof(float));
}

WIDEST static void mamba(const Mamba *step)
{
    const Py_ssize_t dim = step->head_dim, size = step->size, share = step->heads / step->groups;
    for (Py_ssize_t at = 0; at < step->requests * step->heads; at++) {
        const Py_ssize_t head = at % step->heads, group = at / step->heads * step->groups + head / share;
        const float *inputs = step->inputs + at * dim, dt = step->dt[at];
        const float decay = expf(dt * step->decay[head]);
        float *out = step->out + at * dim;
        for (Py_ssize_t row = 0; row < dim; row += LANES)
            mamba_rows(step, step->state + (at * dim + row) * size, inputs + row,
                       step->b + group * size, step->c + group * size, dt, decay, out + row,
                       dim - row < LANES ? dim - row : LANES);
        for (Py_ssize_t row = 0; row < dim; row++)
            out[row] += inputs[row] * step->skip[head];
    }
}

typedef struct {
    float *state;               /* [requests, heads, key_dim, value_dim] */
    const float *query, *key;   /* [requests, key_heads, key_dim] */
    const float *value;         /* [requests, heads, value_dim] */
    const float *decay, *beta;  /* [requests, heads] */
    float *out;                 /* [requests, heads, value_dim] */
    Py_ssize_t requests, heads, key_heads, key_dim, value_dim;
} Delta;

/* Columns [0, count) of a head's state, count <= LANES. */
INLINE void delta_columns(const Delta *step, float *state, const float *query, const float *key,
                          const float *value, float decay, float beta, float *out, Py_ssize_t count)
{
    const Py_ssize_t stride = step->value_dim, dim = step->key_dim;
    const size_t bytes = (size_t)count * sizeof(float);
    Lanes known = {0}, read = {0};
    for (Py_ssize_t row = 0; row < dim; row++) {
        const Lanes old = count == LANES ? (Lanes)*(Loose *)(state + row * stride)
                                         : loaded(state + row * stride, count);
        known += old * decay * key[row];
    }
    const Lanes delta = (loaded(value, count) - known) * beta;
    for (Py_ssize_t row = 0; row < dim; row++) {
        float *place = state + row * stride;
        if (count == LANES) {
            const Lanes new = *(Loose *)place * decay + delta * key[row];
            *(Loose *)place = new;
            read += new * query[row];
        } else {
            const Lanes new = loaded(place, count) * decay + delta * key[row];
            memcpy(place, &new, bytes);
            read += new * query[row];
        }
    }
    memcpy(out, &read, bytes);
}

WIDEST static void delta_rule(const Delta *step)
{
    const Py_ssize_t dim = step->value_dim, share = step->heads / step->key_heads;
    for (Py_ssize_t at = 0; at < step->requests * step->heads; at++) {
        const Py_ssize_t key_head = at / step->heads * step->key_heads + at % step->heads / share;
        const float *query = step->query + key_head * step->key_dim;
        const float *key = step->key + key_head * step->key_dim;
        const float decay = expf(step->decay[at]);
        for (Py_ssize_t column = 0; column < dim; column += LANES)
            delta_columns(step, step->state + at * step->key_dim * dim + column, query, key,
                          step->value + at * dim + column, decay, step->beta[at],
                          step->out + at * dim + column,
                          dim - column < LANES ? dim - column : LANES);
    }
}

/* state [n, channels, width] moves on by one of inputs [n, channels]; out: its last `taps` times
 * weight [channels, taps], and bias [channels] where there is one. */
static void convolve(float *state, const float *inputs, const float *weight, const float *bias,
                     float *out, const Py_ssize_t *shape, Py_ssize_t taps)
{
    const Py_ssize_t channels = shape[1], width = shape[2];
    for (Py_ssize_t at = 0; at < shape[0] * channels; at++, state += width) {
        const float *taken = weight + at % channels * taps;
        float sum = bias ? bias[at % channels] : 0;
        memmove(state, state + 1, (size_t)(width - 1) * sizeof(float));
        state[width - 1] = inputs[at];
        for (Py_ssize_t tap = 0; tap < taps; tap++)
            sum += state[width - taps + tap] * taken[tap];
        out[at] = sum;
    }
}

static PyObject *misfit(void)
{
    PyErr_SetString(PyExc_ValueError, "arrays of shapes that do not belong together");
    return NULL;
}

static int alike(const Py_buffer *view, Py_ssize_t first, Py_ssize_t second, Py_ssize_t third)
{
    const Py_ssize_t *shape = view->shape;
    return shape[0] == first && (view->ndim < 2 || shape[1] == second)
           && (view->ndim < 3 || shape[2] == third);
}

enum { STATE, INPUTS, DT, B, C, MAMBA_OUT, DECAY, SKIP, OF_MAMBA };

static const Expected of_mamba[] = {
    {4, 4, 1, "state"}, {4, 3, 0, "inputs"}, {4, 2, 0, "dt"},    {4, 3, 0, "b"},
    {4, 3, 0, "c"},     {4, 3, 1, "out"},    {4, 1, 0, "decay"}, {4, 1, 0, "skip"},
};

static PyObject *mamba_into(PyObject *module, PyObject *args)
{
    PyObject *objects[OF_MAMBA], *done = NULL;
    Py_buffer v[OF_MAMBA];

    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOOO", &objects[0], &objects[1], &objects[2], &objects[3],
                          &objects[4], &objects[5], &objects[6], &objects[7])
        || open_arrays(objects, v, of_mamba, OF_MAMBA) < 0)
        return NULL;
    const Py_ssize_t *shape = v[STATE].shape, groups = v[B].shape[1];
    const Mamba step = {
        .state = v[STATE].buf, .inputs = v[INPUTS].buf, .dt = v[DT].buf, .decay = v[DECAY].buf,
        .b = v[B].buf, .c = v[C].buf, .skip = v[SKIP].buf, .out = v[MAMBA_OUT].buf,
        .requests = shape[0], .heads = shape[1], .groups = groups, .head_dim = shape[2],
        .size = shape[3],
    };
    if (groups < 1 || shape[1] % groups || !alike(&v[INPUTS], shape[0], shape[1], shape[2])
        || !alike(&v[MAMBA_OUT], shape[0], shape[1], shape[2])
        || !alike(&v[DT], shape[0], shape[1], 0) || !alike(&v[B], shape[0], groups, shape[3])
        || !alike(&v[C], shape[0], groups, shape[3]) || !alike(&v[DECAY], shape[1], 0, 0)
        || !alike(&v[SKIP], shape[1], 0, 0)) {
        misfit();
    } else {
        Py_BEGIN_ALLOW_THREADS
        mamba(&step);
        Py_END_ALLOW_THREADS
        done = Py_NewRef(Py_None);
    }
    close_arrays(v, OF_MAMBA);
    return done;
}

enum { QUERY = 1, KEY, VALUE, GATE, BETA, DELTA_OUT, OF_DELTA };

static const Expected of_delta[] = {
    {4, 4, 1, "state"}, {4, 3, 0, "query"}, {4, 3, 0, "key"}, {4, 3, 0, "value"},
    {4, 2, 0, "decay"}, {4, 2, 0, "beta"},  {4, 3, 1, "out"},
};

static PyObject *delta_into(PyObject *module, PyObject *args)
{
    PyObject *objects[OF_DELTA], *done = NULL;
    Py_buffer v[OF_DELTA];

    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOO", &objects[0], &objects[1], &objects[2], &objects[3],
                          &objects[4], &objects[5], &objects[6])
        || open_arrays(objects, v, of_delta, OF_DELTA) < 0)
        return NULL;
    const Py_ssize_t *shape = v[STATE].shape, key_heads = v[KEY].shape[1];
    const Delta step = {
        .state = v[STATE].buf, .query = v[QUERY].buf, .key = v[KEY].buf, .value = v[VALUE].buf,
        .decay = v[GATE].buf, .beta = v[BETA].buf, .out = v[DELTA_OUT].buf,
        .requests = shape[0], .heads = shape[1], .key_heads = key_heads, .key_dim = shape[2],
        .value_dim = shape[3],
    };
    if (key_heads < 1 || shape[1] % key_heads || !alike(&v[QUERY], shape[0], key_heads, shape[2])
        || !alike(&v[KEY], shape[0], key_heads, shape[2])
        || !alike(&v[VALUE], shape[0], shape[1], shape[3])
        || !alike(&v[DELTA_OUT], shape[0], shape[1], shape[3])
        || !alike(&v[GATE], shape[0], shape[1], 0) || !alike(&v[BETA], shape[0], shape[1], 0)) {
        misfit();
    } else {
        Py_BEGIN_ALLOW_THREADS
        delta_rule(&step);
        Py_END_ALLOW_THREADS
        done = Py_NewRef(Py_None);
    }
    close_arrays(v, OF_DELTA);
    return done;
}

enum { CONV_INPUTS = 1, CONV_OUT, WEIGHT, BIAS, OF_CONV };

static const Expected of_conv[] = {
    {4, 3, 1, "state"}, {4, 2, 0, "inputs"}, {4, 2, 1, "out"}, {4, 2, 0, "weight"}, {4, 1, 0, "bias"},
};

static PyObject *convolve_into(PyObject *module, PyObject *args)
{
    PyObject *objects[OF_CONV], *done = NULL;
    Py_buffer v[OF_CONV];

    (void)module;
    objects[BIAS] = NULL;
    if (!PyArg_ParseTuple(args, "OOOO|O", &objects[0], &objects[1], &objects[2], &objects[3],
                          &objects[4]))
        return NULL;
    const int count = objects[BIAS] == NULL ? BIAS : OF_CONV;
    if (open_arrays(objects, v, of_conv, count) < 0)
        return NULL;
    const Py_ssize_t *shape = v[STATE].shape, taps = v[WEIGHT].shape[1];
    if (taps < 1 || taps > shape[2] || v[WEIGHT].shape[0] != shape[1]
        || !alike(&v[CONV_INPUTS], shape[0], shape[1], 0)
        || !alike(&v[CONV_OUT], shape[0], shape[1], 0)
        || (count == OF_CONV && !alike(&v[BIAS], shape[1], 0, 0))) {
        misfit();
    } else {
        Py_BEGIN_ALLOW_THREADS
        convolve(v[STATE].buf, v[CONV_INPUTS].buf, v[WEIGHT].buf,
                 count == OF_CONV ? v[BIAS].buf : NULL, v[CONV_OUT].buf, shape, taps);
        Py_END_ALLOW_THREADS
        done = Py_NewRef(Py_None);
    }
    close_arrays(v, count);
    return done;
}

static PyMethodDef methods[] = {
    {"mamba_into", mamba_into, METH_VARARGS,
     "mamba_into(state, inputs, dt, b, c, out, decay, skip)\n\nMamba-2: changes state, fills out."},
    {"delta_into", delta_into, METH_VARARGS,
     "delta_into(state, query, key, value, decay, beta, out)\n\nThe gated delta rule: changes "
     "state, fills out."},
    {"convolve_into", convolve_into, METH_VARARGS,
     "convolve_into(state, inputs, out, weight[, bias])\n\nA convolution of each channel: changes "
     "state, fills out."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_state_steps", "One token on states.", 0, methods, NULL, NULL, NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__state_steps(void)
{
    return PyModule_Create(&definition);
}
