// AVX-512 for tests on processors without it: SIMDe, and what we use that SIMDe lacks, in AVX2.
#ifndef QRT_SIMDE_H
#define QRT_SIMDE_H
#include <simde/x86/avx512.h>
#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef union {
    simde__m512 v;
    simde__m512i i;
    __m256 h[2];
    __m256i hi[2];
} qrt_halves;

static inline simde__m512i qrt_cvtps_epi32(simde__m512 a) {
    qrt_halves x = {.v = a}, y;
    for (int i = 0; i < 2; i++) y.hi[i] = _mm256_cvtps_epi32(x.h[i]);
    return y.i;
}
static inline simde__m512 qrt_cvtph_ps(__m256i a) {
    qrt_halves y;
    y.h[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(a));
    y.h[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1));
    return y.v;
}
static inline __m256i qrt_cvtps_ph(simde__m512 a) {
    qrt_halves x = {.v = a};
    return _mm256_set_m128i(_mm256_cvtps_ph(x.h[1], 0), _mm256_cvtps_ph(x.h[0], 0));
}
static inline simde__m512i qrt_cvtepu16_epi32(__m256i a) {
    qrt_halves y;
    y.hi[0] = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(a));
    y.hi[1] = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1));
    return y.i;
}
static inline simde__m512 qrt_roundscale_ps(simde__m512 a) {
    qrt_halves x = {.v = a}, y;
    for (int i = 0; i < 2; i++) y.h[i] = _mm256_round_ps(x.h[i], 8);
    return y.v;
}
static inline simde__m512 qrt_cvtepi32_ps(simde__m512i a) {
    qrt_halves x = {.i = a}, y;
    for (int i = 0; i < 2; i++) y.h[i] = _mm256_cvtepi32_ps(x.hi[i]);
    return y.v;
}
static inline __m128i qrt_cvtepi32_epi8(simde__m512i a) {
    int8_t b[16];
    int32_t w[16];
    memcpy(w, &a, sizeof w);
    for (int i = 0; i < 16; i++) b[i] = (int8_t)w[i];
    return _mm_loadu_si128((const __m128i *)b);
}
// The same rounding as the instruction's for numbers that are not subnormal.
static inline __m256i qrt_cvtneps_pbh(simde__m512 a) {
    uint32_t w[16];
    uint16_t h[16];
    memcpy(w, &a, sizeof w);
    for (int i = 0; i < 16; i++) {
        const bool nan = (w[i] & 0x7fffffff) > 0x7f800000;
        h[i] = (uint16_t)(nan ? w[i] >> 16 | 0x40 : (w[i] + 0x7fff + (w[i] >> 16 & 1)) >> 16);
    }
    return _mm256_loadu_si256((const __m256i *)h);
}
static inline simde__m512 qrt_dpbf16_ps(simde__m512 acc, simde__m512 a, simde__m512 b) {
    qrt_halves s = {.v = acc}, x = {.v = a}, y = {.v = b};
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    for (int i = 0; i < 2; i++) {
        const __m256 xu = _mm256_castsi256_ps(_mm256_and_si256(x.hi[i], upper)),
                     yu = _mm256_castsi256_ps(_mm256_and_si256(y.hi[i], upper)),
                     xl = _mm256_castsi256_ps(_mm256_slli_epi32(x.hi[i], 16)),
                     yl = _mm256_castsi256_ps(_mm256_slli_epi32(y.hi[i], 16));
        s.h[i] = _mm256_fmadd_ps(xl, yl, _mm256_fmadd_ps(xu, yu, s.h[i]));
    }
    return s.v;
}
#undef _mm512_cvtneps_pbh
#undef _mm512_dpbf16_ps
#undef __m512bh
#define __m512bh simde__m512
#define _mm512_cvtneps_pbh(a) qrt_cvtneps_pbh(a)
#define _mm512_dpbf16_ps(acc, a, b) qrt_dpbf16_ps(acc, a, b)
#undef _mm512_cvtps_epi32
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps(a) qrt_cvtepi32_ps(a)
#undef _mm512_cvtepi32_epi8
#define _mm512_cvtepi32_epi8(a) qrt_cvtepi32_epi8(a)
#undef _mm512_cvtph_ps
#undef _mm512_cvtps_ph
#undef _mm512_cvtepu16_epi32
#undef _mm512_roundscale_ps
#define _mm512_cvtps_epi32(a) qrt_cvtps_epi32(a)
#define _mm512_cvtph_ps(a) qrt_cvtph_ps(a)
#define _mm512_cvtps_ph(a, mode) qrt_cvtps_ph(a)
#define _mm512_cvtepu16_epi32(a) qrt_cvtepu16_epi32(a)
#define _mm512_roundscale_ps(a, mode) qrt_roundscale_ps(a)
#endif
