// Float32 primitives for AVX2 + FMA + F16C.
#ifndef QRT_SIMD_H
#define QRT_SIMD_H
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "../blocks.h"

#define QF 8
typedef __m256 qf;
static inline qf qf_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void qf_store(float *p, qf a) { _mm256_storeu_ps(p, a); }
static inline qf qf_set1(float a) { return _mm256_set1_ps(a); }
static inline qf qf_zero(void) { return _mm256_setzero_ps(); }
static inline qf qf_add(qf a, qf b) { return _mm256_add_ps(a, b); }
static inline qf qf_sub(qf a, qf b) { return _mm256_sub_ps(a, b); }
static inline qf qf_mul(qf a, qf b) { return _mm256_mul_ps(a, b); }
static inline qf qf_div(qf a, qf b) { return _mm256_div_ps(a, b); }
static inline qf qf_fma(qf a, qf b, qf c) { return _mm256_fmadd_ps(a, b, c); }
static inline qf qf_fnma(qf a, qf b, qf c) { return _mm256_fnmadd_ps(a, b, c); }
static inline qf qf_max(qf a, qf b) { return _mm256_max_ps(a, b); }
static inline qf qf_min(qf a, qf b) { return _mm256_min_ps(a, b); }
static inline qf qf_abs(qf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline float qf_hsum(qf a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float qf_hmax(qf a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
static inline qf qf_round(qf a) { return _mm256_round_ps(a, 8); } // to nearest even, no exceptions
static inline qf qf_pow2i(qf n) {
    __m256i i = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(i, 23));
}
static inline qf qf_from_f16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static inline qf qf_from_bf16(const uint16_t *p) {
    __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}
static inline void qf_to_f16(uint16_t *p, qf a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, 0));
}
#include "expf.h"
#endif
