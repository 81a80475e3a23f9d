/* Vectors of 16 floats, whatever the processor has, for helpers that are the same to the bit on all
 * of them. All is inlined, and compiled with -ffp-contract=off. */
#ifndef STRATAKV_LANES_H
#define STRATAKV_LANES_H

#include <stdint.h>
#include <string.h>

enum { LANES = 16 };
#pragma GCC diagnostic ignored "-Wpsabi" /* no vector crosses a call: all of it is inlined */
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Words __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef float Loose __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDEST __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define WIDEST
#endif
#define INLINE static inline __attribute__((always_inline))

/* Of each run of 2 * size lanes both halves added: those of `a` in front of those of `b`. */
#define ADD(a, b, halves, size)                                                                    \
    (__builtin_shuffle(a, b, halves) + __builtin_shuffle(a, b, halves + size))
#define FRONT(a, b, c, d, e, f, g, h)                                                              \
    {a, b, c, d, e, f, g, h, 16 + a, 16 + b, 16 + c, 16 + d, 16 + e, 16 + f, 16 + g, 16 + h}

/* The sum of each of LANES vectors. */
INLINE Lanes sums_of(Lanes *v)
{
    const Words eights = FRONT(0, 1, 2, 3, 4, 5, 6, 7), fours = FRONT(0, 1, 2, 3, 8, 9, 10, 11);
    const Words twos = FRONT(0, 1, 4, 5, 8, 9, 12, 13), ones = FRONT(0, 2, 4, 6, 8, 10, 12, 14);
    for (int i = 0; i < 8; i++)
        v[i] = ADD(v[2 * i], v[2 * i + 1], eights, 8);
    for (int i = 0; i < 4; i++)
        v[i] = ADD(v[2 * i], v[2 * i + 1], fours, 4);
    for (int i = 0; i < 2; i++)
        v[i] = ADD(v[2 * i], v[2 * i + 1], twos, 2);
    return ADD(v[0], v[1], ones, 1);
}

/* e to the power of each, which is 0 or less; NaN stays NaN. Within 2 units in the last place:
 * Cephes' expf, whose polynomial this is. */
INLINE Lanes exps(Lanes x)
{
    const Lanes none = {0};
    const Lanes bias = none + 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    const Words low = x < -87.0f;          /* there a float has no exponent left for it */
    const Lanes power = (x * 1.44269504088896341f + bias) - bias;
    Lanes r = x - power * 0.693359375f;
    r = r + power * 2.12194440e-4f;
    Lanes y = none + 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    /* 2^power by its bits: the rounded sum holds power + 127 in its lowest ones. */
    const Words bits = ((Words)(power + (bias + 127.0f)) << 23) & ~low;
    return (Lanes)((Words)(y * (Lanes)bits) & ~low);
}

INLINE Lanes loaded(const float *from, Py_ssize_t count)
{
    Lanes lanes = {0};
    memcpy(&lanes, from, (size_t)count * sizeof(float));
    return lanes;
}

#endif
