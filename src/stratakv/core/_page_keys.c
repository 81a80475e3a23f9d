/* The chain of page keys, for processors that have instructions for SHA-256.
 *
 * Owns the loop over pages of core/page_keys.py and nothing else: what a key means is there, and the
 * same loop over hashlib, which serves where this module cannot be imported. Each key is SHA-256 of
 * the key before it and of one page's bytes. FIPS 180-4; rounds as Intel's manual pairs them.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_ROUNDS 1
#include <cpuid.h>
#include <immintrin.h>
#endif

enum { BLOCK = 64, DIGEST = 32 };

#ifdef HAS_ROUNDS

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

/* a, b, e, f and c, d, g, h of the first state, highest first, as the instructions want them. */
static const uint32_t FIRST[8] = {0x9b05688c, 0x510e527f, 0xbb67ae85, 0x6a09e667,
                                  0x5be0cd19, 0x1f83d9ab, 0xa54ff53a, 0x3c6ef372};

static int has_instructions(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSSE3) || !(c & bit_SSE4_1))
        return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 29)); /* SHA */
}

/* Takes `blocks` blocks into the state. */
__attribute__((target("sha,sse4.1,ssse3"))) static void
compress(__m128i state[2], const uint8_t *data, Py_ssize_t blocks)
{
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    __m128i abef = state[0], cdgh = state[1];
    for (; blocks > 0; blocks--, data += BLOCK) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i words[4];
        for (int i = 0; i < 4; i++)
            words[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)data + i), swap);
#pragma GCC unroll 16
        for (int quad = 0; quad < 16; quad++) {
            __m128i *const now = words + (quad & 3), *const last = words + ((quad + 3) & 3);
            if (quad >= 4) { /* the schedule: of the last 16 words the next four */
                const __m128i seventh =
                    _mm_alignr_epi8(*last, words[(quad + 2) & 3], 4);
                *now = _mm_sha256msg1_epu32(*now, words[(quad + 1) & 3]);
                *now = _mm_sha256msg2_epu32(_mm_add_epi32(*now, seventh), *last);
            }
            const __m128i sum =
                _mm_add_epi32(*now, _mm_loadu_si128((const __m128i *)(K + 4 * quad)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    state[0] = abef, state[1] = cdgh;
}

/* The digest of a state: a to h, each with its highest byte first. */
__attribute__((target("sha,sse4.1,ssse3"))) static void
digest_of(const __m128i state[2], uint8_t digest[DIGEST])
{
    uint32_t parts[8]; /* f e b a h g d c */
    static const int order[8] = {3, 2, 7, 6, 1, 0, 5, 4};
    _mm_storeu_si128((__m128i *)parts, state[0]);
    _mm_storeu_si128((__m128i *)parts + 1, state[1]);
    for (int i = 0; i < 8; i++) {
        const uint32_t part = __builtin_bswap32(parts[order[i]]);
        memcpy(digest + 4 * i, &part, sizeof part);
    }
}

/* SHA-256 of a digest and of `size` bytes, with `scratch` for the whole padded message. */
__attribute__((target("sha,sse4.1,ssse3"))) static void
hash_page(const uint8_t before[DIGEST], const uint8_t *page, Py_ssize_t size, uint8_t *scratch,
          Py_ssize_t padded, uint8_t digest[DIGEST])
{
    __m128i state[2] = {_mm_loadu_si128((const __m128i *)FIRST),
                        _mm_loadu_si128((const __m128i *)(FIRST + 4))};
    memcpy(scratch, before, DIGEST);
    memcpy(scratch + DIGEST, page, (size_t)size); /* what is behind it is the same for all pages */
    compress(state, scratch, padded / BLOCK);
    digest_of(state, digest);
}

static PyObject *keys_of(const uint8_t *previous, const uint8_t *data, Py_ssize_t pages,
                         Py_ssize_t size)
{
    const Py_ssize_t padded = (DIGEST + size + 1 + 8 + BLOCK - 1) / BLOCK * BLOCK;
    const uint64_t bits = __builtin_bswap64((uint64_t)(DIGEST + size) * 8);
    PyObject *keys = PyList_New(pages);
    uint8_t *scratch = PyMem_Calloc(1, (size_t)padded);
    if (keys == NULL || scratch == NULL) {
        Py_XDECREF(keys);
        PyMem_Free(scratch);
        return PyErr_NoMemory();
    }
    scratch[DIGEST + size] = 0x80;
    memcpy(scratch + padded - sizeof bits, &bits, sizeof bits);
    for (Py_ssize_t i = 0; i < pages; i++) {
        PyObject *key = PyBytes_FromStringAndSize(NULL, DIGEST);
        if (key == NULL) {
            Py_CLEAR(keys);
            break;
        }
        uint8_t *digest = (uint8_t *)PyBytes_AS_STRING(key);
        hash_page(previous, data + i * size, size, scratch, padded, digest);
        previous = digest;
        PyList_SET_ITEM(keys, i, key);
    }
    PyMem_Free(scratch);
    return keys;
}

static PyObject *chain(PyObject *module, PyObject *args)
{
    Py_buffer previous, data;
    Py_ssize_t size;
    PyObject *keys = NULL;

    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*n", &previous, &data, &size))
        return NULL;
    if (previous.len != DIGEST || size < 1 || size > PY_SSIZE_T_MAX / 16 || data.len % size)
        PyErr_SetString(PyExc_ValueError, "needs a digest of 32 bytes, and whole pages");
    else
        keys = keys_of(previous.buf, data.buf, data.len / size, size);
    PyBuffer_Release(&previous);
    PyBuffer_Release(&data);
    return keys;
}

static PyMethodDef methods[] = {
    {"chain", chain, METH_VARARGS,
     "chain(previous, data, page_bytes): SHA-256 of each page behind the digest before it."},
    {NULL, NULL, 0, NULL},
};
#else
static int has_instructions(void) { return 0; }
static PyMethodDef methods[] = {{NULL, NULL, 0, NULL}};
#endif

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_page_keys", NULL, -1, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__page_keys(void)
{
    if (!has_instructions()) {
        PyErr_SetString(PyExc_ImportError, "this processor has no instructions for SHA-256");
        return NULL;
    }
    return PyModule_Create(&definition);
}
