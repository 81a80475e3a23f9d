/* Finds where selected entries are read, one look at each.
 *
 * Owns the inner loops of sparse/reads.py and nothing else: what its arguments mean, and the same
 * in NumPy, is there. Rows, entries and positions are checked here, because a wrong one would be an
 * address.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include "../core/_arrays.h"

/* Whether `view` has as many rows as `rows`, and `columns` of them. */
static int like(const Py_buffer *view, const Py_buffer *rows, Py_ssize_t columns)
{
    return view->shape[0] == rows->shape[0] && view->shape[1] == columns;
}

static int outside(Py_ssize_t value, Py_ssize_t end)
{
    return (size_t)value >= (size_t)end;
}

static const char not_together[] = "arrays of shapes that do not belong together";

enum { HOST, ROWS, ENTRIES, SELECTION, AWAY };

static const char *find_away(const Py_buffer *views, const Py_buffer *hidden, Py_ssize_t page_rows)
{
    const Py_ssize_t requests = views[HOST].shape[0], pages = views[HOST].shape[1];
    const Py_ssize_t columns = views[ENTRIES].shape[1];
    const int32_t *rows = views[ROWS].buf;
    if (!like(&views[ENTRIES], &views[ROWS], columns)
        || !like(&views[SELECTION], &views[ROWS], columns)
        || (hidden != NULL && !like(hidden, &views[ROWS], columns)) || page_rows < 1
        || page_rows > INT32_MAX || pages > INT32_MAX / page_rows)
        return not_together;
    for (Py_ssize_t at = 0; at < views[ROWS].shape[0]; at++) {
        const int64_t *entries = (const int64_t *)views[ENTRIES].buf + at * columns;
        int32_t *selection = (int32_t *)views[SELECTION].buf + at * columns;
        const uint8_t *hides = hidden == NULL ? NULL : (uint8_t *)hidden->buf + at * columns;
        if (outside(rows[at], requests))
            return "a row outside the tables";
        const int32_t *host = (const int32_t *)views[HOST].buf + rows[at] * pages;
        for (Py_ssize_t c = 0; c < columns; c++) {
            if (outside(entries[c], pages * page_rows))
                return "an entry beyond the longest request";
            const int32_t page = host[(uint32_t)entries[c] / (uint32_t)page_rows];
            const int there = page >= 0 && !(hides != NULL && hides[c]);
            selection[c] = there ? (int32_t)entries[c] : -1;
        }
    }
    return NULL;
}

static PyObject *away_into(PyObject *module, PyObject *args)
{
    static const Expected expected[AWAY] = {
        {4, 2, 0, "host"}, {4, 1, 0, "rows"}, {8, 2, 0, "entries"}, {4, 2, 1, "selection"}};
    static const Expected mask = {1, 2, 0, "hidden"};
    PyObject *objects[AWAY], *hides;
    Py_buffer views[AWAY], hidden;
    Py_ssize_t page_rows;

    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOn", &objects[HOST], &objects[ROWS], &objects[ENTRIES], &hides,
                          &objects[SELECTION], &page_rows)
        || open_arrays(objects, views, expected, AWAY) < 0)
        return NULL;
    const int some = hides != Py_None;
    if (some && open_arrays(&hides, &hidden, &mask, 1) < 0) {
        close_arrays(views, AWAY);
        return NULL;
    }
    const char *wrong = find_away(views, some ? &hidden : NULL, page_rows);
    close_arrays(&hidden, some);
    close_arrays(views, AWAY);
    if (wrong != NULL) {
        PyErr_SetString(PyExc_ValueError, wrong);
        return NULL;
    }
    Py_RETURN_NONE;
}

enum { P_HOST, P_BUFFER, P_ROWS, P_SELECTION, P_POSITIONS, P_MISSED, P_FOUND, P_COPIES, PLACE };

static int place_fits(const Py_buffer *views, Py_ssize_t page_rows)
{
    const Py_ssize_t columns = views[P_SELECTION].shape[1];
    for (int at = P_SELECTION; at <= P_FOUND; at++)
        if (!like(&views[at], &views[P_ROWS], columns))
            return 0;
    return views[P_BUFFER].shape[0] == views[P_HOST].shape[0] && views[P_COPIES].shape[0] == 4
           && views[P_COPIES].shape[1] == views[P_ROWS].shape[0] * columns && page_rows >= 1
           && page_rows <= INT32_MAX && views[P_HOST].shape[1] <= INT32_MAX / page_rows
           && views[P_BUFFER].shape[1] <= INT32_MAX / page_rows;
}

static const char *place_row(const Py_buffer *views, Py_ssize_t at, uint32_t size, Py_ssize_t *count)
{
    const Py_ssize_t row = ((const int32_t *)views[P_ROWS].buf)[at];
    const Py_ssize_t pages = views[P_HOST].shape[1], places = views[P_BUFFER].shape[1];
    const Py_ssize_t columns = views[P_SELECTION].shape[1], most = views[P_COPIES].shape[1];
    const Py_ssize_t first = at * columns;
    const int32_t *selection = (const int32_t *)views[P_SELECTION].buf + first;
    const int32_t *positions = (const int32_t *)views[P_POSITIONS].buf + first;
    const uint8_t *missed = (const uint8_t *)views[P_MISSED].buf + first;
    int64_t *found = (int64_t *)views[P_FOUND].buf + first;
    int32_t *copies = views[P_COPIES].buf;
    if (outside(row, views[P_HOST].shape[0]))
        return "a row outside the tables";
    const int32_t *host = (const int32_t *)views[P_HOST].buf + row * pages;
    const int32_t *buffer = (const int32_t *)views[P_BUFFER].buf + row * places;
    for (Py_ssize_t c = 0; c < columns; c++) {
        if (positions[c] < 0)
            continue;
        const uint32_t position = (uint32_t)positions[c], entry = (uint32_t)selection[c];
        if (outside(position / size, places) || outside(entry / size, pages))
            return "a position or an entry outside the tables";
        const int32_t page = buffer[position / size];
        found[c] = (int64_t)page * size + position % size;
        if (!missed[c])
            continue;
        copies[*count] = page;
        copies[most + *count] = (int32_t)(position % size);
        copies[2 * most + *count] = host[entry / size];
        copies[3 * most + *count] = (int32_t)(entry % size);
        ++*count;
    }
    return NULL;
}

static PyObject *place_into(PyObject *module, PyObject *args)
{
    static const Expected expected[PLACE] = {
        {4, 2, 0, "host"},      {4, 2, 0, "buffer"}, {4, 1, 0, "rows"},  {4, 2, 0, "selection"},
        {4, 2, 0, "positions"}, {1, 2, 0, "missed"}, {8, 2, 1, "found"}, {4, 2, 1, "copies"}};
    PyObject *objects[PLACE];
    Py_buffer views[PLACE];
    Py_ssize_t page_rows, count = 0;

    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOOOn", &objects[0], &objects[1], &objects[2], &objects[3],
                          &objects[4], &objects[5], &objects[6], &objects[7], &page_rows)
        || open_arrays(objects, views, expected, PLACE) < 0)
        return NULL;
    const char *wrong = place_fits(views, page_rows) ? NULL : not_together;
    for (Py_ssize_t at = 0; at < views[P_ROWS].shape[0] && wrong == NULL; at++)
        wrong = place_row(views, at, (uint32_t)page_rows, &count);
    close_arrays(views, PLACE);
    if (wrong != NULL) {
        PyErr_SetString(PyExc_ValueError, wrong);
        return NULL;
    }
    return PyLong_FromSsize_t(count);
}

enum { K_ROWS, K_SELECTION, K_POSITIONS, K_MISSED, K_AFTER, K_RESIDENT, K_LRU, KEEP };

static int keep_fits(const Py_buffer *views)
{
    const Py_ssize_t columns = views[K_SELECTION].shape[1], size = views[K_RESIDENT].shape[1];
    return like(&views[K_SELECTION], &views[K_ROWS], columns)
           && like(&views[K_POSITIONS], &views[K_ROWS], columns)
           && like(&views[K_MISSED], &views[K_ROWS], columns)
           && like(&views[K_AFTER], &views[K_ROWS], size)
           && like(&views[K_LRU], &views[K_RESIDENT], size);
}

static const char *keep_row(const Py_buffer *views, Py_ssize_t at)
{
    const Py_ssize_t row = ((const int32_t *)views[K_ROWS].buf)[at];
    const Py_ssize_t columns = views[K_SELECTION].shape[1], size = views[K_RESIDENT].shape[1];
    const int32_t *selection = (const int32_t *)views[K_SELECTION].buf + at * columns;
    const int32_t *positions = (const int32_t *)views[K_POSITIONS].buf + at * columns;
    const uint8_t *missed = (const uint8_t *)views[K_MISSED].buf + at * columns;
    if (outside(row, views[K_RESIDENT].shape[0]))
        return "a row outside the tables";
    int32_t *resident = (int32_t *)views[K_RESIDENT].buf + row * size;
    for (Py_ssize_t c = 0; c < columns; c++) {
        if (!missed[c])
            continue;
        if (outside(positions[c], size))
            return "a position outside the tables";
        resident[positions[c]] = selection[c];
    }
    memcpy((int16_t *)views[K_LRU].buf + row * size, (const int16_t *)views[K_AFTER].buf + at * size,
           (size_t)size * sizeof(int16_t));
    return NULL;
}

static PyObject *keep_into(PyObject *module, PyObject *args)
{
    static const Expected expected[KEEP] = {
        {4, 1, 0, "rows"},  {4, 2, 0, "selection"}, {4, 2, 0, "positions"}, {1, 2, 0, "missed"},
        {2, 2, 0, "after"}, {4, 2, 1, "resident"},  {2, 2, 1, "lru"}};
    PyObject *objects[KEEP];
    Py_buffer views[KEEP];

    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOO", &objects[0], &objects[1], &objects[2], &objects[3],
                          &objects[4], &objects[5], &objects[6])
        || open_arrays(objects, views, expected, KEEP) < 0)
        return NULL;
    const char *wrong = keep_fits(views) ? NULL : not_together;
    for (Py_ssize_t at = 0; at < views[K_ROWS].shape[0] && wrong == NULL; at++)
        wrong = keep_row(views, at);
    close_arrays(views, KEEP);
    if (wrong != NULL) {
        PyErr_SetString(PyExc_ValueError, wrong);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"away_into", away_into, METH_VARARGS,
     "away_into(host, rows, entries, hidden, selection, page_rows)\n\nFills selection."},
    {"place_into", place_into, METH_VARARGS,
     "place_into(host, buffer, rows, selection, positions, missed, found, copies, page_rows)\n\n"
     "Fills found, and as many columns of copies as it returns. ValueError for anything outside "
     "the tables; what was filled until then is void."},
    {"keep_into", keep_into, METH_VARARGS,
     "keep_into(rows, selection, positions, missed, after, resident, lru)\n\nChanges the last two; "
     "ValueError as above."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_reads", "Where selected entries are read.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__reads(void)
{
    return PyModule_Create(&definition);
}
