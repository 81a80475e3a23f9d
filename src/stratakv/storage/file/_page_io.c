/* Reads and writes the payloads of slots and hashes them, with the GIL released once.
 *
 * Owns the loop over pages and nothing else: places and sizes are the caller's (segment.py), and the
 * hash is xxhash's own code, whose addresses come in with every call (compiled_page_io.py).
 *
 * A thread that asks for the GIL after every page waits for up to 5 ms each time that another one
 * computes: 24 pages of 1 MiB took 25 to 35 ms in vLLM that way, of which a page's own was 0.2 ms.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <limits.h>
#include <stdint.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MOST_PARTS = 256, BLOCK_BYTES = 4096 };

typedef uint64_t (*Hash)(const void *, size_t);
typedef void *(*CreateState)(void);
typedef int (*FreeState)(void *);
typedef int (*ResetState)(void *);
typedef int (*UpdateState)(void *, const void *, size_t);
typedef uint64_t (*DigestState)(const void *);

typedef struct {
    Hash hash;
    CreateState create;
    FreeState free;
    ResetState reset;
    UpdateState update;
    DigestState digest;
} Library;

typedef struct {
    Library library;
    int fd;
    off_t stride;
    off_t *at; /* of each page */
    Py_ssize_t piece; /* what is hashed while the core's cache still has it */
    Py_ssize_t count;
    Py_buffer *pages;
    uint64_t *hashes;
    char *is_short; /* the file ends inside the page */
    void *state;
    Py_ssize_t done; /* pages before an error */
    int error;
} Batch;

static const char ZEROS[BLOCK_BYTES];

/* All of it; 0 where the file ends before, -1 with errno. */
static int read_whole(int fd, char *into, size_t size, off_t at)
{
    while (size) {
        const ssize_t got = pread(fd, into, size, at);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return (int)got;
        into += got, at += got, size -= (size_t)got;
    }
    return 1;
}

/* All of them, padding too: a block of which only a part is written has to be read first. */
static int write_parts(int fd, const struct iovec *parts, int count, off_t at)
{
    ssize_t put = pwritev(fd, parts, count, at);
    if (put < 0 && errno != EINTR)
        return -1;
    size_t skip = put < 0 ? 0 : (size_t)put; /* a signal or a full disk cuts writes short */
    for (int i = 0; i < count; i++) {
        const char *from = parts[i].iov_base;
        const size_t size = parts[i].iov_len;
        size_t done = skip < size ? skip : size;
        skip -= done;
        while (done < size) {
            put = pwrite(fd, from + done, size - done, at + (off_t)done);
            if (put < 0 && errno == EINTR)
                continue;
            if (put == 0)
                errno = EIO;
            if (put <= 0)
                return -1;
            done += (size_t)put;
        }
        at += (off_t)size;
    }
    return 0;
}

static uint64_t hash_of(const Batch *batch, Py_ssize_t i)
{
    return batch->library.hash(batch->pages[i].buf, (size_t)batch->pages[i].len);
}

/* A part of a page that `start` and `size` name: moved, 1; 0 where the file ends before, -1 with
   errno. */
typedef int (*Move)(const Batch *, Py_ssize_t i, Py_ssize_t start, size_t size);

/* A page larger than a piece, which is hashed while the cache has it; what `move` says of the last
   piece. */
static int in_pieces(Batch *batch, Py_ssize_t i, Move move)
{
    const Library *library = &batch->library;
    const char *page = batch->pages[i].buf;
    const Py_ssize_t size = batch->pages[i].len;
    library->reset(batch->state);
    for (Py_ssize_t start = 0; start < size; start += batch->piece) {
        const Py_ssize_t rest = size - start;
        const size_t some = (size_t)(rest < batch->piece ? rest : batch->piece);
        const int moved = move(batch, i, start, some);
        if (moved != 1)
            return moved;
        library->update(batch->state, page + start, some);
    }
    batch->hashes[i] = library->digest(batch->state);
    return 1;
}

static int read_piece(const Batch *batch, Py_ssize_t i, Py_ssize_t start, size_t size)
{
    char *page = batch->pages[i].buf;
    return read_whole(batch->fd, page + start, size, batch->at[i] + start);
}

/* The last one with what pads the page. */
static int write_piece(const Batch *batch, Py_ssize_t i, Py_ssize_t start, size_t size)
{
    const Py_buffer *page = &batch->pages[i];
    const int is_last = start + (Py_ssize_t)size == page->len;
    const size_t after = is_last ? (size_t)(batch->stride - page->len) : 0;
    const struct iovec parts[] = {{(char *)page->buf + start, size}, {(void *)ZEROS, after}};
    return write_parts(batch->fd, parts, after ? 2 : 1, batch->at[i] + start) < 0 ? -1 : 1;
}

static int leave_piece(const Batch *batch, Py_ssize_t i, Py_ssize_t start, size_t size)
{
    (void)batch, (void)i, (void)start, (void)size;
    return 1;
}

static int read_page(Batch *batch, Py_ssize_t i)
{
    const Py_ssize_t size = batch->pages[i].len;
    int whole;
    if (size > batch->piece) {
        whole = in_pieces(batch, i, read_piece);
    } else {
        whole = read_piece(batch, i, 0, (size_t)size);
        if (whole == 1)
            batch->hashes[i] = hash_of(batch, i);
    }
    batch->is_short[i] = whole == 0;
    return whole;
}

/* How many pages from `first` on one call of the system moves: those that follow one another. */
static Py_ssize_t together(const Batch *batch, Py_ssize_t first)
{
    Py_ssize_t most = batch->piece / batch->stride, some = 1;
    if (most > MOST_PARTS / 2)
        most = MOST_PARTS / 2;
    if (most > batch->count - first)
        most = batch->count - first;
    while (some < most && batch->at[first + some] == batch->at[first + some - 1] + batch->stride)
        some++;
    return some;
}

/* The pages [first, first + count) and what pads them, as they lie in the file; their bytes. */
static size_t parts_of(
    const Batch *batch, Py_ssize_t first, Py_ssize_t count, void *padding, struct iovec *parts,
    int *used)
{
    size_t size = 0;
    *used = 0;
    for (Py_ssize_t i = first; i < first + count; i++) {
        const size_t page = (size_t)batch->pages[i].len, rest = (size_t)batch->stride - page;
        parts[(*used)++] = (struct iovec){batch->pages[i].buf, page};
        if (rest)
            parts[(*used)++] = (struct iovec){padding, rest};
        size += page + rest;
    }
    return size;
}

static void read_all(Batch *batch)
{
    char sink[BLOCK_BYTES];
    struct iovec parts[MOST_PARTS];
    while (batch->done < batch->count) {
        const Py_ssize_t first = batch->done, some = together(batch, first);
        if (some > 1) {
            int used;
            const size_t size = parts_of(batch, first, some, sink, parts, &used);
            if (preadv(batch->fd, parts, used, batch->at[first]) == (ssize_t)size) {
                for (Py_ssize_t i = first; i < first + some; i++)
                    batch->hashes[i] = hash_of(batch, i);
                batch->done += some;
                continue;
            } /* the file ends here, or a signal came: see which of them are whole */
        }
        for (; batch->done < first + some; batch->done++) {
            if (read_page(batch, batch->done) < 0) {
                batch->error = errno;
                return;
            }
        }
    }
}

static void write_all(Batch *batch)
{
    struct iovec parts[MOST_PARTS];
    while (batch->done < batch->count) {
        const Py_ssize_t first = batch->done, some = together(batch, first);
        int failed;
        if (batch->stride > batch->piece) {
            failed = in_pieces(batch, first, write_piece) < 0;
        } else {
            int used;
            parts_of(batch, first, some, (void *)ZEROS, parts, &used);
            failed = write_parts(batch->fd, parts, used, batch->at[first]);
        }
        if (failed) {
            batch->error = errno;
            return;
        }
        /* Only now: the copy into the kernel has brought the pages into the cache. */
        for (Py_ssize_t i = first; i < first + some && batch->stride <= batch->piece; i++)
            batch->hashes[i] = hash_of(batch, i);
        batch->done += some;
    }
}

/* What is in memory, so that whoever hands over a library can see that it hashes right. */
static void hash_all(Batch *batch)
{
    for (; batch->done < batch->count; batch->done++) {
        if (batch->pages[batch->done].len > batch->piece)
            in_pieces(batch, batch->done, leave_piece);
        else
            batch->hashes[batch->done] = hash_of(batch, batch->done);
    }
}

static int allocate(Batch *batch, Py_ssize_t count)
{
    const size_t room = count ? (size_t)count : 1;
    batch->at = PyMem_Calloc(room, sizeof(off_t));
    batch->pages = PyMem_Calloc(room, sizeof(Py_buffer));
    batch->hashes = PyMem_Calloc(room, sizeof(uint64_t));
    batch->is_short = PyMem_Calloc(room, 1);
    batch->state = batch->library.create();
    if (batch->at && batch->pages && batch->hashes && batch->is_short && batch->state)
        return 0;
    PyErr_NoMemory();
    return -1;
}

/* `batch->count`: the pages whose buffers are held, also after an error. */
static int fill(Batch *batch, PyObject *places, PyObject *pages, int flags)
{
    const Py_ssize_t count = PyTuple_GET_SIZE(pages);
    if (PyTuple_GET_SIZE(places) != count) {
        PyErr_SetString(PyExc_ValueError, "as many places as pages are wanted");
        return -1;
    }
    if (allocate(batch, count) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        batch->at[i] = (off_t)PyLong_AsLongLong(PyTuple_GET_ITEM(places, i));
        if (batch->at[i] == -1 && PyErr_Occurred())
            return -1;
        Py_buffer *page = &batch->pages[i];
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(pages, i), page, flags) < 0)
            return -1;
        batch->count++;
        if (page->len > batch->stride || batch->stride - page->len >= BLOCK_BYTES) {
            PyErr_Format(
                PyExc_ValueError, "a page of %zd bytes in a slot of %lld", page->len,
                (long long)batch->stride);
            return -1;
        }
    }
    return 0;
}

static int parse(PyObject *args, Batch *batch, int flags)
{
    unsigned long long at[6];
    long long stride;
    PyObject *given_places, *given_pages;
    if (!PyArg_ParseTuple(
            args, "(KKKKKK)iLnOO", &at[0], &at[1], &at[2], &at[3], &at[4], &at[5], &batch->fd,
            &stride, &batch->piece, &given_places, &given_pages))
        return -1;
    batch->library = (Library){
        (Hash)(uintptr_t)at[0], (CreateState)(uintptr_t)at[1], (FreeState)(uintptr_t)at[2],
        (ResetState)(uintptr_t)at[3], (UpdateState)(uintptr_t)at[4], (DigestState)(uintptr_t)at[5],
    };
    batch->stride = (off_t)stride;
    if (stride <= 0 || batch->piece <= 0) {
        PyErr_SetString(PyExc_ValueError, "a stride or a piece without a byte");
        return -1;
    }
    /* Of their own: what is asked for its number or its buffer could change a list meanwhile. */
    PyObject *places = PySequence_Tuple(given_places), *pages = NULL;
    if (places != NULL)
        pages = PySequence_Tuple(given_pages);
    const int failed = pages == NULL ? -1 : fill(batch, places, pages, flags);
    Py_XDECREF(places);
    Py_XDECREF(pages); /* the buffers hold what they are of */
    return failed;
}

static void release(Batch *batch)
{
    for (Py_ssize_t i = 0; i < batch->count; i++)
        PyBuffer_Release(&batch->pages[i]);
    PyMem_Free(batch->at);
    PyMem_Free(batch->pages);
    PyMem_Free(batch->hashes);
    PyMem_Free(batch->is_short);
    if (batch->state)
        batch->library.free(batch->state);
}

static PyObject *hashes_of(const Batch *batch)
{
    PyObject *found = PyList_New(batch->done);
    for (Py_ssize_t i = 0; found != NULL && i < batch->done; i++) {
        PyObject *hash = batch->is_short[i] ? PyLong_FromLong(-1)
                                            : PyLong_FromUnsignedLongLong(batch->hashes[i]);
        if (hash == NULL)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, i, hash);
    }
    return found;
}

static PyObject *run(PyObject *args, int flags, void (*work)(Batch *))
{
    Batch batch = {0};
    PyObject *hashes = NULL;
    if (parse(args, &batch, flags) == 0) {
        Py_BEGIN_ALLOW_THREADS
        work(&batch);
        Py_END_ALLOW_THREADS
        hashes = hashes_of(&batch);
    }
    const int error = batch.error;
    release(&batch);
    return hashes == NULL ? NULL : Py_BuildValue("Ni", hashes, error);
}

static PyObject *read_pages(PyObject *module, PyObject *args)
{
    (void)module;
    return run(args, PyBUF_WRITABLE, read_all);
}

static PyObject *write_pages(PyObject *module, PyObject *args)
{
    (void)module;
    return run(args, PyBUF_SIMPLE, write_all);
}

static PyObject *hash_pages(PyObject *module, PyObject *args)
{
    (void)module;
    return run(args, PyBUF_SIMPLE, hash_all);
}

static PyMethodDef METHODS[] = {
    {"read_pages", read_pages, METH_VARARGS, "Fill pages from their places and hash them."},
    {"write_pages", write_pages, METH_VARARGS, "Write pages to their places and hash them."},
    {"hash_pages", hash_pages, METH_VARARGS, "Hash pages as they are."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "stratakv.storage.file._page_io",
    "Payloads of slots, read or written and hashed.", -1, METHODS, NULL, NULL, NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__page_io(void)
{
    return PyModule_Create(&MODULE);
}
