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
// From now on in a register: a compiler that finds it used twice may else load it twice.
static inline qf qf_held(qf a) {
    __asm__("" : "+w"(a));
    return a;
}
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
static inline qf qf_above(qf a, qf b, qf v) {
    return vreinterpretq_f32_u32(vandq_u32(vcgtq_f32(a, b), vreinterpretq_u32_f32(v)));
}
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
static inline void qf_hsum4(float *out, qf a, qf b, qf c, qf d) {
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}
// Lane c of v[i] is p[3c + i].
static inline void qf_load3(const float *p, qf v[3]) {
    float32x4x3_t t = vld3q_f32(p);
    v[0] = t.val[0], v[1] = t.val[1], v[2] = t.val[2];
}
static inline void qf_store3(float *p, const qf v[3]) {
    vst3q_f32(p, (float32x4x3_t){{v[0], v[1], v[2]}});
}
static inline void qf_load4(const float *p, qf v[4]) {
    float32x4x4_t t = vld4q_f32(p);
    v[0] = t.val[0], v[1] = t.val[1], v[2] = t.val[2], v[3] = t.val[3];
}
static inline void qf_to_i8(int8_t *p, qf a) {
    int16x4_t w = vmovn_s32(vcvtnq_s32_f32(a));
    int8x8_t b = vmovn_s16(vcombine_s16(w, w));
    vst1_lane_s32((int32_t *)(void *)p, vreinterpret_s32_s8(b), 0);
}
#include "expf.h"
#include "part.h"
#endif
