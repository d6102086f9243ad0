// Float32 primitives for AVX-512 (F, BW, DQ, VL).
#ifndef QRT_SIMD_H
#define QRT_SIMD_H
#ifdef QRT_SIMDE // tests on processors without AVX-512
#    include "simde.h"
#else
#    include <immintrin.h>
#endif
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "../blocks.h"

#define QF 16
typedef __m512 qf;
static inline qf qf_load(const float *p) { return _mm512_loadu_ps(p); }
// From now on in a register: a compiler that finds it used twice may else load it twice.
static inline qf qf_held(qf a) {
#ifndef QRT_SIMDE
    __asm__("" : "+v"(a));
#endif
    return a;
}
// A value stays in a register here: without it the compiler mixes all steps and runs out of
// registers.
#ifdef QRT_SIMDE
#    define HOLD(v) ((void)(v))
#else
#    define HOLD(v) __asm__ volatile("" : "+v"(v))
#endif
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
static inline qf qf_above(qf a, qf b, qf v) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, 30), v);
}
static inline qf qf_abs(qf a) { return _mm512_abs_ps(a); }
static inline __m256 qf_upper(qf a) {
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
}
static inline float qf_hsum(qf a) {
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), qf_upper(a));
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float qf_hmax(qf a) {
    __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a), qf_upper(a));
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
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
#ifdef QRT_LEVEL_AVX512BF16
// Vectors of 2 * QF bfloat16 in a qf: two columns to a lane.
static inline qf qf_pairs(const uint16_t *p) {
    return _mm512_loadu_ps((const float *)(const void *)p);
}
static inline void qf_to_bf16(uint16_t *p, qf a) { // to nearest even; subnormals become zero
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(a));
}
// acc + both products of each lane, the upper column first; subnormals count as zero
static inline qf qf_fma_pairs(qf a, qf b, qf acc) {
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}
#endif
static inline void qf_hsum4(float *out, qf a, qf b, qf c, qf d) {
    qf ab = qf_add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    qf cd = qf_add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    qf s = qf_add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(s), qf_upper(s));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
}
// Lane c of v[i] is p[3c + i]. As 3 and 16 have no common factor, the lanes (3c + i) % 16 differ
// for all c: a blend collects them, a permutation (its indices count modulo 16) orders them.
static inline void qf_load3(const float *p, qf v[3]) {
    qf a = qf_load(p), b = qf_load(p + 16), c = qf_load(p + 32);
    __m512i at = _mm512_setr_epi32(0, 3, 6, 9, 12, 15, 2, 5, 8, 11, 14, 1, 4, 7, 10, 13);
    v[0] = _mm512_mask_blend_ps(0x2492, _mm512_mask_blend_ps(0x4924, a, b), c);
    v[1] = _mm512_mask_blend_ps(0x4924, _mm512_mask_blend_ps(0x9249, a, b), c);
    v[2] = _mm512_mask_blend_ps(0x9249, _mm512_mask_blend_ps(0x2492, a, b), c);
    for (int i = 0; i < 3; i++, at = _mm512_add_epi32(at, _mm512_set1_epi32(1))) {
        v[i] = _mm512_permutexvar_ps(at, v[i]);
    }
}
static inline void qf_store3(float *p, const qf v[3]) {
    __m512i at = _mm512_setr_epi32(0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15, 10, 5);
    __m512i back = _mm512_set1_epi32(-11);
    qf a = _mm512_permutexvar_ps(at, v[0]);
    at = _mm512_add_epi32(at, back);
    qf b = _mm512_permutexvar_ps(at, v[1]);
    qf c = _mm512_permutexvar_ps(_mm512_add_epi32(at, back), v[2]);
    qf_store(p, _mm512_mask_blend_ps(0x4924, _mm512_mask_blend_ps(0x2492, a, b), c));
    qf_store(p + 16, _mm512_mask_blend_ps(0x2492, _mm512_mask_blend_ps(0x9249, a, b), c));
    qf_store(p + 32, _mm512_mask_blend_ps(0x9249, _mm512_mask_blend_ps(0x4924, a, b), c));
}
// Quadruples i, i + 4, i + 8, i + 12 of p.
static inline qf qf_quads(const float *p) {
    qf a = _mm512_castps128_ps512(_mm_loadu_ps(p));
    a = _mm512_insertf32x4(a, _mm_loadu_ps(p + 16), 1);
    a = _mm512_insertf32x4(a, _mm_loadu_ps(p + 32), 2);
    return _mm512_insertf32x4(a, _mm_loadu_ps(p + 48), 3);
}
static inline void qf_load4(const float *p, qf v[4]) {
    qf a = qf_quads(p), b = qf_quads(p + 4), c = qf_quads(p + 8), d = qf_quads(p + 12);
    qf ab = _mm512_unpacklo_ps(a, b), cd = _mm512_unpacklo_ps(c, d);
    v[0] = _mm512_shuffle_ps(ab, cd, 0x44), v[1] = _mm512_shuffle_ps(ab, cd, 0xee);
    ab = _mm512_unpackhi_ps(a, b), cd = _mm512_unpackhi_ps(c, d);
    v[2] = _mm512_shuffle_ps(ab, cd, 0x44), v[3] = _mm512_shuffle_ps(ab, cd, 0xee);
}
static inline void qf_to_i8(int8_t *p, qf a) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}
#include "expf.h"
#include "part.h"
#endif
