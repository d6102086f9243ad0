// Float32 primitives for AVX2 + FMA + F16C.
#ifndef QRT_SIMD_H
#define QRT_SIMD_H
#if defined(QRT_HALF_VECTORS) && defined(QRT_SIMDE) // as in avx512.h
#    include "simde.h"
#else
#    include <immintrin.h>
#endif
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "../blocks.h"

#define QF 8
typedef __m256 qf;
static inline qf qf_load(const float *p) { return _mm256_loadu_ps(p); }
// From now on in a register: a compiler that finds it used twice may else load it twice.
static inline qf qf_held(qf a) {
    __asm__("" : "+x"(a));
    return a;
}
// A value stays in a register here: without it the compiler mixes all steps and runs out of
// registers.
#define HOLD(v) __asm__ volatile("" : "+x"(v))
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
static inline qf qf_above(qf a, qf b, qf v) { return _mm256_and_ps(_mm256_cmp_ps(a, b, 30), v); }
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
static inline void qf_hsum4(float *out, qf a, qf b, qf c, qf d) {
    qf ab = qf_add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    qf cd = qf_add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    qf s = qf_add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}
// Lane c of v[i] is p[3c + i]. As 3 and 8 have no common factor, the lanes (3c + i) % 8 differ for
// all c: a blend collects them, a permutation orders them.
static inline void qf_load3(const float *p, qf v[3]) {
    qf a = qf_load(p), b = qf_load(p + 8), c = qf_load(p + 16);
    __m256i at = _mm256_setr_epi32(0, 3, 6, 1, 4, 7, 2, 5), one = _mm256_set1_epi32(1);
    v[0] = _mm256_blend_ps(_mm256_blend_ps(a, b, 0x92), c, 0x24);
    v[1] = _mm256_blend_ps(_mm256_blend_ps(a, b, 0x24), c, 0x49);
    v[2] = _mm256_blend_ps(_mm256_blend_ps(a, b, 0x49), c, 0x92);
    for (int i = 0; i < 3; i++, at = _mm256_add_epi32(at, one)) {
        v[i] = _mm256_permutevar8x32_ps(v[i], at);
    }
}
static inline void qf_store3(float *p, const qf v[3]) {
    __m256i at = _mm256_setr_epi32(0, 3, 6, 1, 4, 7, 2, 5), back = _mm256_set1_epi32(-3);
    qf a = _mm256_permutevar8x32_ps(v[0], at);
    at = _mm256_add_epi32(at, back);
    qf b = _mm256_permutevar8x32_ps(v[1], at);
    qf c = _mm256_permutevar8x32_ps(v[2], _mm256_add_epi32(at, back));
    qf_store(p, _mm256_blend_ps(_mm256_blend_ps(a, b, 0x92), c, 0x24));
    qf_store(p + 8, _mm256_blend_ps(_mm256_blend_ps(a, b, 0x24), c, 0x49));
    qf_store(p + 16, _mm256_blend_ps(_mm256_blend_ps(a, b, 0x49), c, 0x92));
}
static inline void qf_load4(const float *p, qf v[4]) {
    qf a = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + 16), 1);
    qf b =
        _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p + 4)), _mm_loadu_ps(p + 20), 1);
    qf c =
        _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p + 8)), _mm_loadu_ps(p + 24), 1);
    qf d =
        _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p + 12)), _mm_loadu_ps(p + 28), 1);
    qf ab = _mm256_unpacklo_ps(a, b), cd = _mm256_unpacklo_ps(c, d);
    v[0] = _mm256_shuffle_ps(ab, cd, 0x44), v[1] = _mm256_shuffle_ps(ab, cd, 0xee);
    ab = _mm256_unpackhi_ps(a, b), cd = _mm256_unpackhi_ps(c, d);
    v[2] = _mm256_shuffle_ps(ab, cd, 0x44), v[3] = _mm256_shuffle_ps(ab, cd, 0xee);
}
static inline void qf_to_i8(int8_t *p, qf a) {
    __m256i i = _mm256_cvtps_epi32(a);
    __m128i w = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(w, w));
}
#include "expf.h"
#include "part.h"
#endif
