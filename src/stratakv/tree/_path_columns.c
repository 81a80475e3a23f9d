/* What a lease does to every row of one path, in one pass over the columns of all groups.
 *
 * Owns the loops over rows of tree/path_columns.py and nothing else: what pins, ranks and needs mean
 * is there, and the same in NumPy, which serves where this module was not built. A column is held
 * from its first use to the end of the table; no row is written before every row of a call is known
 * to be one of the table's.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { MOST_GROUPS = 64, STATES = 6, SOME_WARM = -1 };

typedef struct {
    PyObject_HEAD
    Py_ssize_t rows, groups;
    Py_buffer hits;
    Py_buffer *columns; /* of each group: pins on the device, on the host, rank, need, state */
    uint8_t tiers_of[STATES];
} PathColumns;

enum { PINS, HOST_PINS, RANK, NEED, STATE, KINDS };
static const Py_ssize_t WIDTH[KINDS] = {4, 4, 8, 8, 1};

/* The ranks of one call: one for all rows of a group, or one for each. */
typedef struct {
    Py_ssize_t first; /* of the path's rows, the first that the group has */
    int64_t rank;
    const char *ranks; /* NULL: `rank` for all */
    Py_ssize_t stride;
    Py_buffer buffer;
} Share;

static int hold(PyObject *array, Py_buffer *held, Py_ssize_t width, int how)
{
    if (PyObject_GetBuffer(array, held, how) < 0)
        return -1;
    if (held->itemsize == width)
        return 0;
    PyBuffer_Release(held);
    PyErr_Format(PyExc_TypeError, "needs items of %zd bytes", width);
    return -1;
}

static int hold_columns(PathColumns *self, PyObject *const kinds[KINDS])
{
    for (int kind = 0; kind < KINDS; kind++)
        for (Py_ssize_t group = 0; group < self->groups; group++) {
            const int written = kind == PINS || kind == RANK;
            Py_buffer *column = self->columns + group * KINDS + kind;
            PyObject *array = PySequence_GetItem(kinds[kind], group);
            if (array == NULL)
                return -1;
            const int held = hold(array, column, WIDTH[kind], written ? PyBUF_CONTIG : PyBUF_CONTIG_RO);
            Py_DECREF(array);
            if (held < 0)
                return -1;
            if (column->len != self->rows * WIDTH[kind]) {
                PyErr_SetString(PyExc_ValueError, "needs columns of one length");
                return -1;
            }
        }
    return 0;
}

static PyObject *columns_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    PyObject *hits, *kinds[KINDS], *tiers_of;
    if (named != NULL && PyDict_GET_SIZE(named)) {
        PyErr_SetString(PyExc_TypeError, "takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "OOOOOOS", &hits, &kinds[PINS], &kinds[HOST_PINS],
                          &kinds[RANK], &kinds[NEED], &kinds[STATE], &tiers_of))
        return NULL;
    const Py_ssize_t groups = PySequence_Size(kinds[PINS]);
    if (groups < 0)
        return NULL;
    if (groups > MOST_GROUPS || PyBytes_GET_SIZE(tiers_of) != STATES) {
        PyErr_SetString(PyExc_ValueError, "too many groups, or other states");
        return NULL;
    }
    PathColumns *self = (PathColumns *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    memcpy(self->tiers_of, PyBytes_AS_STRING(tiers_of), STATES);
    self->columns = PyMem_Calloc((size_t)(groups ? groups : 1) * KINDS, sizeof(Py_buffer));
    if (self->columns == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->groups = groups;
    if (hold(hits, &self->hits, 4, PyBUF_CONTIG) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->rows = self->hits.len / 4;
    if (hold_columns(self, kinds) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void columns_free(PyObject *object)
{
    PathColumns *self = (PathColumns *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyBuffer_Release(&self->hits);
    if (self->columns != NULL)
        for (Py_ssize_t at = 0; at < self->groups * KINDS; at++)
            PyBuffer_Release(self->columns + at);
    PyMem_Free(self->columns);
    type->tp_free(object);
    Py_DECREF(type);
}

static void *column(const PathColumns *self, Py_ssize_t group, int kind)
{
    return self->columns[group * KINDS + kind].buf;
}

static void drop(Share *shares, Py_ssize_t count)
{
    for (Py_ssize_t group = 0; group < count; group++)
        if (shares[group].ranks != NULL)
            PyBuffer_Release(&shares[group].buffer);
}

/* Reads one group's first row and its ranks. */
static int share_of(PyObject *start, PyObject *rank, Py_ssize_t length, Share *share)
{
    share->ranks = NULL;
    share->first = PyLong_AsSsize_t(start);
    if (share->first == -1 && PyErr_Occurred())
        return -1;
    if (share->first < 0 || share->first > length)
        share->first = length; /* a group that has none of them */
    if (PyLong_Check(rank)) {
        share->rank = PyLong_AsLongLong(rank);
        return share->rank == -1 && PyErr_Occurred() ? -1 : 0;
    }
    if (hold(rank, &share->buffer, 8, PyBUF_STRIDED_RO) < 0)
        return -1;
    if (share->buffer.ndim == 1 && share->buffer.len == (length - share->first) * 8) {
        share->ranks = share->buffer.buf;
        share->stride = share->buffer.strides[0];
        return 0;
    }
    PyBuffer_Release(&share->buffer);
    PyErr_SetString(PyExc_ValueError, "needs one rank, or one for each row");
    return -1;
}

/* Takes the arguments of a call apart: a path of rows that are in the table, and each group's. */
static int take_apart(const PathColumns *self, PyObject *const *args, PyObject *counts,
                      Py_buffer *path, Share *shares)
{
    PyObject *starts = args[1], *ranks = args[2];
    if (!PyList_Check(starts) || !PyList_Check(ranks) || !PyList_Check(counts) ||
        PyList_GET_SIZE(starts) != self->groups || PyList_GET_SIZE(ranks) != self->groups ||
        PyList_GET_SIZE(counts) != self->groups) {
        PyErr_SetString(PyExc_TypeError, "needs lists with something for each group");
        return -1;
    }
    if (hold(args[0], path, 8, PyBUF_CONTIG_RO) < 0)
        return -1;
    const Py_ssize_t length = path->len / 8;
    const int64_t *rows = path->buf;
    Py_ssize_t group = 0;
    uint64_t highest = 0;
    for (Py_ssize_t at = 0; at < length; at++)
        if ((uint64_t)rows[at] > highest)
            highest = (uint64_t)rows[at];
    if (length && highest >= (uint64_t)self->rows) {
        PyErr_SetString(PyExc_IndexError, "a row that the table has not");
        goto failed;
    }
    for (; group < self->groups; group++)
        if (share_of(PyList_GET_ITEM(starts, group), PyList_GET_ITEM(ranks, group), length,
                     shares + group) < 0)
            goto failed;
    return 0;
failed:
    drop(shares, group);
    PyBuffer_Release(path);
    return -1;
}

static void rank_rows(const PathColumns *self, Py_ssize_t group, const Share *share,
                      const int64_t *rows, Py_ssize_t length)
{
    int64_t *rank = column(self, group, RANK);
    if (share->ranks == NULL)
        for (Py_ssize_t at = share->first; at < length; at++)
            rank[rows[at]] = share->rank;
    else
        for (Py_ssize_t at = share->first; at < length; at++)
            memcpy(rank + rows[at], share->ranks + (at - share->first) * share->stride, 8);
}

/* Adds to one number of a list. */
static int add_to(PyObject *numbers, Py_ssize_t group, Py_ssize_t more)
{
    const Py_ssize_t before = PyLong_AsSsize_t(PyList_GET_ITEM(numbers, group));
    if (before == -1 && PyErr_Occurred())
        return -1;
    PyObject *number = PyLong_FromSsize_t(before + more);
    return number == NULL ? -1 : PyList_SetItem(numbers, group, number);
}

static PyObject *lease(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    PathColumns *self = (PathColumns *)object;
    Share shares[MOST_GROUPS];
    Py_buffer path;
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "needs a path, starts, ranks, hits, and counts");
        return NULL;
    }
    const long more = PyLong_AsLong(args[3]);
    if ((more == -1 && PyErr_Occurred()) || take_apart(self, args, args[4], &path, shares) < 0)
        return NULL;
    const int64_t *rows = path.buf;
    const Py_ssize_t length = path.len / 8;
    int failed = 0;
    if (more) {
        int32_t *hits = self->hits.buf;
        for (Py_ssize_t at = 0; at < length; at++)
            hits[rows[at]] += (int32_t)more;
    }
    for (Py_ssize_t group = 0; group < self->groups; group++) {
        int32_t *pins = column(self, group, PINS);
        Py_ssize_t fresh = 0;
        rank_rows(self, group, shares + group, rows, length);
        for (Py_ssize_t at = shares[group].first; at < length; at++)
            fresh += pins[rows[at]]++ == 0;
        failed |= add_to(args[4], group, -fresh);
    }
    drop(shares, self->groups);
    PyBuffer_Release(&path);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* Of rows that nothing pins on any tier and nothing needs: gives them rank 0, and returns the tiers
 * that have any of them, as bits. SOME_WARM where one of them is not so, and changes nothing. */
static int cool(const PathColumns *self, Py_ssize_t group, const int64_t *rows, Py_ssize_t length)
{
    const int32_t *host_pins = column(self, group, HOST_PINS);
    const int64_t *need = column(self, group, NEED);
    const uint8_t *state = column(self, group, STATE);
    int64_t *rank = column(self, group, RANK);
    int64_t held = 0;
    int tiers = 0;
    for (Py_ssize_t at = 0; at < length; at++) {
        held |= host_pins[rows[at]] | need[rows[at]];
        tiers |= self->tiers_of[state[rows[at]] % STATES];
    }
    if (held)
        return SOME_WARM;
    for (Py_ssize_t at = 0; at < length; at++)
        rank[rows[at]] = 0;
    return tiers;
}

static PyObject *release(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    PathColumns *self = (PathColumns *)object;
    Share shares[MOST_GROUPS];
    Py_buffer path;
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "needs a path, starts, ranks, and counts");
        return NULL;
    }
    PyObject *found = PyList_New(self->groups);
    if (found == NULL || take_apart(self, args, args[3], &path, shares) < 0) {
        Py_XDECREF(found);
        return NULL;
    }
    const int64_t *rows = path.buf;
    const Py_ssize_t length = path.len / 8;
    for (Py_ssize_t group = 0; group < self->groups; group++) {
        const Py_ssize_t first = shares[group].first;
        int32_t *pins = column(self, group, PINS);
        Py_ssize_t freed = 0;
        rank_rows(self, group, shares + group, rows, length);
        for (Py_ssize_t at = first; at < length; at++)
            freed += --pins[rows[at]] == 0;
        int64_t become = 0;
        if (freed && group == 0)
            become = ((int64_t *)column(self, 0, RANK))[rows[length - 1]];
        else if (freed)
            become = freed == length - first ? cool(self, group, rows + first, freed) : SOME_WARM;
        PyObject *number = PyLong_FromLongLong(become);
        if (number == NULL || add_to(args[3], group, freed) < 0)
            Py_CLEAR(found); /* out of memory for a small integer: the process cannot go on */
        if (found == NULL) {
            Py_XDECREF(number);
            break;
        }
        PyList_SET_ITEM(found, group, number);
    }
    drop(shares, self->groups);
    PyBuffer_Release(&path);
    return found;
}

static PyMethodDef methods[] = {
    {"lease", (PyCFunction)(void (*)(void))lease, METH_FASTCALL,
     "lease(path, starts, ranks, hits, evictable): rank and pin each group's rows."},
    {"release", (PyCFunction)(void (*)(void))release, METH_FASTCALL,
     "release(path, starts, ranks, evictable): the reverse; by group what has become of its rows."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, columns_new},
    {Py_tp_dealloc, columns_free},
    {Py_tp_methods, methods},
    {Py_tp_doc, "PathColumns(hits, pins, host_pins, rank, need, state, tiers_of)"},
    {0, NULL},
};

static PyType_Spec spec = {"stratakv.tree._path_columns.PathColumns", sizeof(PathColumns), 0,
                           Py_TPFLAGS_DEFAULT, slots};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_path_columns", NULL, -1, NULL,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__path_columns(void)
{
    if (sizeof(Py_ssize_t) != 8) {
        PyErr_SetString(PyExc_ImportError, "rows of a tree have 8 bytes here, and 4 on this machine");
        return NULL;
    }
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    PyObject *type = PyType_FromSpec(&spec);
    if (type == NULL || PyModule_AddObject(module, "PathColumns", type) < 0) {
        Py_XDECREF(type);
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
