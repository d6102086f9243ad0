// Float32 primitives without vector instructions; the names that every simd/<isa>.h gives.
#ifndef QRT_SIMD_H
#define QRT_SIMD_H
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "../blocks.h"

#define QF 1 // lanes
typedef float qf;
static inline qf qf_load(const float *p) { return *p; }
static inline qf qf_held(qf a) { return a; }
static inline void qf_store(float *p, qf a) { *p = a; }
static inline qf qf_set1(float a) { return a; }
static inline qf qf_zero(void) { return 0; }
static inline qf qf_add(qf a, qf b) { return a + b; }
static inline qf qf_sub(qf a, qf b) { return a - b; }
static inline qf qf_mul(qf a, qf b) { return a * b; }
static inline qf qf_div(qf a, qf b) { return a / b; }
static inline qf qf_fma(qf a, qf b, qf c) { return a * b + c; }
static inline qf qf_fnma(qf a, qf b, qf c) { return c - a * b; }
static inline qf qf_max(qf a, qf b) { return a > b ? a : b; }
static inline qf qf_min(qf a, qf b) { return a < b ? a : b; }
static inline qf qf_above(qf a, qf b, qf v) { return a > b ? v : 0; } // v where a > b, else 0
static inline qf qf_abs(qf a) { return fabsf(a); }
static inline float qf_hsum(qf a) { return a; }
static inline float qf_hmax(qf a) { return a; }
// To nearest, ties to even, for |a| < 2^22: adding 1.5 * 2^23 drops the fraction without a library
// call.
static inline qf qf_round(qf a) { return (a + 0x1.8p23f) - 0x1.8p23f; }
static inline qf qf_pow2i(qf n) { // 2^n for whole n in -126..127
    uint32_t u = (uint32_t)((int)n + 127) << 23;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline qf qf_from_f16(const uint16_t *p) { return qrt_half((const uint8_t *)p); }
static inline qf qf_from_bf16(const uint16_t *p) {
    uint32_t u = (uint32_t)*p << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline void qf_to_f16(uint16_t *p, qf a) { // to nearest even; overflow to infinity
    uint32_t u;
    memcpy(&u, &a, 4);
    uint32_t sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000) {
        *p = (uint16_t)(sign | 0x7e00);
    } else if (u >= 0x477ff000) {
        *p = (uint16_t)(sign | 0x7c00);
    } else if (u < 0x38800000) {
        *p = (uint16_t)(sign | (uint32_t)nearbyintf(fabsf(a) * 0x1p24f));
    } else {
        *p = (uint16_t)(sign | ((u + 0xfff + (u >> 13 & 1)) - 0x38000000) >> 13);
    }
}
// out[i] = sum of the lanes of the i-th argument; the order of additions is the same for all four.
static inline void qf_hsum4(float *out, qf a, qf b, qf c, qf d) {
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}
// Interleaved triples and quadruples: lane c of v[i] is p[3 * c + i], p[4 * c + i].
static inline void qf_load3(const float *p, qf v[3]) { v[0] = p[0], v[1] = p[1], v[2] = p[2]; }
static inline void qf_store3(float *p, const qf v[3]) { p[0] = v[0], p[1] = v[1], p[2] = v[2]; }
static inline void qf_load4(const float *p, qf v[4]) {
    v[0] = p[0], v[1] = p[1], v[2] = p[2], v[3] = p[3];
}
static inline void qf_to_i8(int8_t *p, qf a) { *p = (int8_t)(int)a; } // whole numbers in -128..127
#include "expf.h"
#include "part.h"
#endif
