/* Plans the swap-in of a batch of requests, with the GIL released.
 *
 * Owns the inner loop of sparse/swap_in.py and nothing else: what its arguments mean, and the same
 * in NumPy, is there. Entries, positions and rows are checked here, because a wrong one would be an
 * address. One request's marks serve them all, so that they stay in the cache: tables are read in
 * order, and only marks at random.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    /* of the batch: [requests] and [requests, top_k] */
    const int32_t *rows;
    const int32_t *selection;
    int32_t *positions;
    uint8_t *missed;
    int16_t *after; /* [requests, size] */
    /* of all rows: [table_rows, size] */
    const int32_t *resident;
    const int16_t *lru;
    Py_ssize_t requests, top_k, size, table_rows, marks;
    int16_t *mark;    /* [marks], all -1; mark[e] is the last column that selects e */
    int32_t *at;      /* scratch [1 + top_k]: the position of each column, behind one for none */
    int16_t *cold;    /* scratch [size + 1] */
    int16_t *warm;    /* scratch [size + 1] */
    uint8_t *needed;  /* scratch [size] */
} Plan;

/* Whether every entry lies in [-1, entries). */
static int within(const int32_t *values, Py_ssize_t count, Py_ssize_t entries)
{
    int wrong = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        wrong |= (uint32_t)values[i] + 1u > (uint32_t)entries;
    return !wrong;
}

/* The order after a selection: cold but for the `misses` coldest, those, warm. 0 where `lru` is no
 * list of positions. */
static int reorder(const Plan *plan, const int16_t *lru, int16_t *after, Py_ssize_t misses)
{
    Py_ssize_t cold = 0, warm = 0;
    for (Py_ssize_t i = 0; i < plan->size; i++) {
        const uint16_t position = (uint16_t)lru[i];
        if (position >= plan->size)
            return 0;
        const int needed = plan->needed[position];
        plan->cold[cold] = (int16_t)position; /* both are written, the right one is kept: */
        plan->warm[warm] = (int16_t)position; /* a branch here would be a guess */
        cold += !needed;
        warm += needed;
    }
    if (misses > cold)
        return 0;
    const size_t item = sizeof(int16_t);
    memcpy(after, plan->cold + misses, (size_t)(cold - misses) * item);
    memcpy(after + cold - misses, plan->cold, (size_t)misses * item);
    memcpy(after + cold, plan->warm, (size_t)warm * item);
    return 1;
}

static int plan_request(const Plan *plan, Py_ssize_t request)
{
    const Py_ssize_t top_k = plan->top_k, row = plan->rows[request];
    const int32_t *selection = plan->selection + request * top_k;
    const int32_t *resident = plan->resident + row * plan->size;
    int32_t *positions = plan->positions + request * top_k;
    uint8_t *missed = plan->missed + request * top_k;
    int16_t *mark = plan->mark + 1; /* mark[-1] is that of no entry */
    int32_t *at = plan->at + 1;     /* at[-1] is that of no column */
    Py_ssize_t misses = 0;

    for (Py_ssize_t c = 0; c < top_k; c++) {
        mark[selection[c]] = (int16_t)c;
        at[c] = -1;
    }
    mark[-1] = -1;
    for (Py_ssize_t p = 0; p < plan->size; p++) {
        const int16_t column = mark[resident[p]];
        at[column] = (int32_t)p;
        plan->needed[p] = column >= 0;
    }
    for (Py_ssize_t c = 0; c < top_k; c++) {
        const int miss = selection[c] >= 0 && mark[selection[c]] == c && at[c] < 0;
        missed[c] = (uint8_t)miss;
        misses += miss;
    }
    const int ordered = reorder(plan, plan->lru + row * plan->size,
                                plan->after + request * plan->size, misses);
    if (ordered && misses > 0) {
        const int16_t *place = plan->cold;
        for (Py_ssize_t c = 0; c < top_k; c++)
            if (missed[c])
                at[c] = *place++;
    }
    at[-1] = -1;
    for (Py_ssize_t c = 0; c < top_k; c++)
        positions[c] = at[mark[selection[c]]]; /* of a twin that of its last column */
    for (Py_ssize_t c = 0; c < top_k; c++)
        mark[selection[c]] = -1;
    return ordered;
}

static const char *run(const Plan *plan)
{
    for (Py_ssize_t i = 0; i < plan->requests; i++) {
        if ((size_t)(int64_t)plan->rows[i] >= (size_t)plan->table_rows)
            return "a row outside the tables";
        if (!within(plan->selection + i * plan->top_k, plan->top_k, plan->marks - 1)
            || !within(plan->resident + plan->rows[i] * plan->size, plan->size, plan->marks - 1))
            return "an entry beyond the longest request";
        if (!plan_request(plan, i))
            return "an order that is no permutation of positions";
    }
    return NULL;
}

enum { ROWS, SELECTION, RESIDENT, LRU, MARKS, POSITIONS, MISSED, AFTER, ARRAYS };

static const Py_ssize_t items[ARRAYS] = {4, 4, 4, 2, 2, 4, 1, 2};
static const char *const names[ARRAYS] = {"rows",  "selection", "resident", "lru",
                                          "marks", "positions", "missed",   "after"};

static int open_array(PyObject *object, Py_buffer *view, int which)
{
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (which >= MARKS ? PyBUF_WRITABLE : 0);
    const int dimensions = which == ROWS || which == MARKS ? 1 : 2;
    if (PyObject_GetBuffer(object, view, flags) < 0)
        return -1;
    if (view->itemsize != items[which] || view->ndim != dimensions) {
        PyErr_Format(PyExc_ValueError, "%s must have %d dimensions and items of %zd bytes",
                     names[which], dimensions, items[which]);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

/* Whether all arrays have the shapes that belong together. */
static int fit(const Plan *plan, const Py_buffer *views)
{
    const Py_ssize_t *positions = views[POSITIONS].shape, *missed = views[MISSED].shape;
    const Py_ssize_t *after = views[AFTER].shape, *selection = views[SELECTION].shape;
    return selection[0] == plan->requests && positions[0] == plan->requests
           && missed[0] == plan->requests && after[0] == plan->requests
           && positions[1] == plan->top_k && missed[1] == plan->top_k && after[1] == plan->size
           && views[LRU].shape[0] == plan->table_rows && views[LRU].shape[1] == plan->size
           && plan->top_k <= plan->size && plan->size <= INT16_MAX && plan->marks >= 1
           && plan->marks <= INT32_MAX;
}

static int run_checked(Plan *plan, const Py_buffer *views)
{
    plan->requests = views[ROWS].shape[0];
    plan->top_k = views[SELECTION].shape[1];
    plan->table_rows = views[RESIDENT].shape[0];
    plan->size = views[RESIDENT].shape[1];
    plan->marks = views[MARKS].shape[0];
    if (!fit(plan, views)) {
        PyErr_SetString(PyExc_ValueError, "arrays of shapes that do not belong together");
        return -1;
    }
    plan->rows = views[ROWS].buf, plan->selection = views[SELECTION].buf;
    plan->resident = views[RESIDENT].buf, plan->lru = views[LRU].buf;
    plan->mark = views[MARKS].buf, plan->positions = views[POSITIONS].buf;
    plan->missed = views[MISSED].buf, plan->after = views[AFTER].buf;
    const size_t top_k = (size_t)plan->top_k, size = (size_t)plan->size;
    const size_t bytes = 4 * (top_k + 1) + 4 * (size + 1) + size;
    char *scratch = PyMem_Malloc(bytes);
    if (scratch == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    plan->at = (int32_t *)scratch;
    plan->cold = (int16_t *)(scratch + 4 * (top_k + 1));
    plan->warm = plan->cold + size + 1;
    plan->needed = (uint8_t *)(plan->warm + size + 1);
    const char *wrong;
    Py_BEGIN_ALLOW_THREADS
    wrong = run(plan);
    Py_END_ALLOW_THREADS
    PyMem_Free(scratch);
    if (wrong != NULL)
        PyErr_SetString(PyExc_ValueError, wrong);
    return wrong == NULL ? 0 : -1;
}

static PyObject *plan_into(PyObject *module, PyObject *args)
{
    PyObject *objects[ARRAYS];
    Py_buffer views[ARRAYS];
    Plan plan;
    int opened = 0, failed = 0;

    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOOO", &objects[0], &objects[1], &objects[2], &objects[3],
                          &objects[4], &objects[5], &objects[6], &objects[7]))
        return NULL;
    while (opened < ARRAYS && !failed) {
        failed = open_array(objects[opened], &views[opened], opened) < 0;
        opened += !failed;
    }
    if (!failed)
        failed = run_checked(&plan, views) < 0;
    while (opened > 0)
        PyBuffer_Release(&views[--opened]);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"plan_into", plan_into, METH_VARARGS,
     "plan_into(rows, selection, resident, lru, marks, positions, missed, after)\n\n"
     "Fills the last three. marks: int16, all -1 before and after, one more than entries that may "
     "be named. ValueError for anything outside the tables; what was filled until then is void."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_swap_in", "Plans swap-ins of selected entries.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__swap_in(void)
{
    return PyModule_Create(&definition);
}
