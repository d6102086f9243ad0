// Rows to int8 in blocks of 32. Needs a simd header; the same bits at every instruction level.
#ifndef QRT_QUANTIZE_H
#define QRT_QUANTIZE_H
#include "kernels.h"

// x[32] is block `block` of row `row`: d = amax / 127, q = x / d to nearest even.
// Below 2^-100 a block counts as zero: its d would be too coarse to divide by.
INLINE void quantize_block32(const float *x, const qrt_quant *to, int64_t row, int64_t block) {
    qf v[32 / QF], m = qf_zero();
    for (int i = 0; i < 32 / QF; i++) {
        v[i] = qf_load(x + i * QF);
        m = qf_max(m, qf_abs(v[i]));
    }
    float d = qf_hmax(m) / 127.0f;
    int64_t at = row * (to->cols / 32) + block;
    int8_t *q = to->q + row * to->cols + block * 32;
    if (d < 0x1p-107f) {
        memset(q, 0, 32);
        to->d[at] = to->s32[at] = to->s16[2 * at] = to->s16[2 * at + 1] = 0;
        to->n32[at] = to->n16[2 * at] = to->n16[2 * at + 1] = 0;
        return;
    }
    qf dd = qf_set1(d);
    float sum[2];
    for (int half = 0; half < 2; half++) {
        qf s = qf_zero(); // whole numbers: exact in any order
        for (int i = half * (16 / QF); i < (half + 1) * (16 / QF); i++) {
            qf w = qf_round(qf_div(v[i], dd));
            qf_to_i8(q + i * QF, w);
            s = qf_add(s, w);
        }
        sum[half] = qf_hsum(s);
    }
    to->d[at] = d + 0.0f * (sum[0] + sum[1]); // a NaN among x, which the maximum may have missed
    to->s32[at] = d * (sum[0] + sum[1]);
    to->s16[2 * at] = d * sum[0];
    to->s16[2 * at + 1] = d * sum[1];
    for (int half = 0; half < 2; half++) // a NaN has no integer, and is in d
        to->n16[2 * at + half] = fabsf(sum[half]) <= 16 * 127 ? (int32_t)sum[half] : 0;
    to->n32[at] = to->n16[2 * at] + to->n16[2 * at + 1];
}
#endif
