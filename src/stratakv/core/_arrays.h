/* Arrays that a helper is given: opened together, or none of them. */
#ifndef STRATAKV_ARRAYS_H
#define STRATAKV_ARRAYS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef struct {
    Py_ssize_t item; /* bytes; 0: two or four */
    int dimensions, writable;
    const char *name;
} Expected;

static void close_arrays(Py_buffer *views, int count)
{
    while (count > 0)
        PyBuffer_Release(&views[--count]);
}

static int open_arrays(PyObject **objects, Py_buffer *views, const Expected *expected, int count)
{
    for (int at = 0; at < count; at++) {
        const Expected *one = &expected[at];
        const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (one->writable ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(objects[at], &views[at], flags) == 0) {
            const Py_ssize_t item = views[at].itemsize;
            const int fits = one->item ? item == one->item : item == 2 || item == 4;
            if (fits && views[at].ndim == one->dimensions)
                continue;
            PyErr_Format(PyExc_ValueError, "%s: %zd bytes an item, %d dimensions", one->name, item,
                         views[at].ndim);
            PyBuffer_Release(&views[at]);
        }
        close_arrays(views, at);
        return -1;
    }
    return 0;
}

#endif
