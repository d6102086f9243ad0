// Float32 primitives for AArch64 Advanced SIMD.
#ifndef QRT_SIMD_H
#define QRT_SIMD_H
#include <arm_neon.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "../blocks.h"

#define QF 4
typedef float32x4_t qf;
static inline qf qf_load(const float *p) { return vld1q_f32(p); }
static inline void qf_store(float *p, qf a) { vst1q_f32(p, a); }
static inline qf qf_set1(float a) { return vdupq_n_f32(a); }
static inline qf qf_zero(void) { return vdupq_n_f32(0); }
static inline qf qf_add(qf a, qf b) { return vaddq_f32(a, b); }
static inline qf qf_sub(qf a, qf b) { return vsubq_f32(a, b); }
static inline qf qf_mul(qf a, qf b) { return vmulq_f32(a, b); }
static inline qf qf_div(qf a, qf b) { return vdivq_f32(a, b); }
static inline qf qf_fma(qf a, qf b, qf c) { return vfmaq_f32(c, a, b); }
static inline qf qf_fnma(qf a, qf b, qf c) { return vfmsq_f32(c, a, b); }
static inline qf qf_max(qf a, qf b) { return vmaxq_f32(a, b); }
static inline qf qf_min(qf a, qf b) { return vminq_f32(a, b); }
static inline qf qf_abs(qf a) { return vabsq_f32(a); }
static inline float qf_hsum(qf a) { return vaddvq_f32(a); }
static inline float qf_hmax(qf a) { return vmaxvq_f32(a); }
static inline qf qf_round(qf a) { return vrndnq_f32(a); }
static inline qf qf_pow2i(qf n) {
    int32x4_t i = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
    return vreinterpretq_f32_s32(vshlq_n_s32(i, 23));
}
static inline qf qf_from_f16(const uint16_t *p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
static inline qf qf_from_bf16(const uint16_t *p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
static inline void qf_to_f16(uint16_t *p, qf a) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a)));
}
#include "expf.h"
#endif
