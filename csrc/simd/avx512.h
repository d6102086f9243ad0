// Float32 primitives for AVX-512 (F, BW, DQ, VL).
#ifndef QRT_SIMD_H
#define QRT_SIMD_H
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "../blocks.h"

#define QF 16
typedef __m512 qf;
static inline qf qf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void qf_store(float *p, qf a) { _mm512_storeu_ps(p, a); }
static inline qf qf_set1(float a) { return _mm512_set1_ps(a); }
static inline qf qf_zero(void) { return _mm512_setzero_ps(); }
static inline qf qf_add(qf a, qf b) { return _mm512_add_ps(a, b); }
static inline qf qf_sub(qf a, qf b) { return _mm512_sub_ps(a, b); }
static inline qf qf_mul(qf a, qf b) { return _mm512_mul_ps(a, b); }
static inline qf qf_div(qf a, qf b) { return _mm512_div_ps(a, b); }
static inline qf qf_fma(qf a, qf b, qf c) { return _mm512_fmadd_ps(a, b, c); }
static inline qf qf_fnma(qf a, qf b, qf c) { return _mm512_fnmadd_ps(a, b, c); }
static inline qf qf_max(qf a, qf b) { return _mm512_max_ps(a, b); }
static inline qf qf_min(qf a, qf b) { return _mm512_min_ps(a, b); }
static inline qf qf_abs(qf a) { return _mm512_abs_ps(a); }
static inline float qf_hsum(qf a) { return _mm512_reduce_add_ps(a); }
static inline float qf_hmax(qf a) { return _mm512_reduce_max_ps(a); }
static inline qf qf_round(qf a) { return _mm512_roundscale_ps(a, 8); } // to nearest even
static inline qf qf_pow2i(qf n) {
    __m512i i = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(i, 23));
}
static inline qf qf_from_f16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
static inline qf qf_from_bf16(const uint16_t *p) {
    __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
}
static inline void qf_to_f16(uint16_t *p, qf a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, 0));
}
#include "expf.h"
#endif
