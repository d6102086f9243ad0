// Ternary formats. TQ2_0: qs[64], d; each 32 bytes hold four planes of 32 elements.
// TQ1_0: qs[48], qh[4], d; a byte holds five (qh: four) base-3 digits as a fraction of 256, most
// significant first.
#ifndef QRT_UNPACK_TQ_H
#define QRT_UNPACK_TQ_H
#include "common.h"

INLINE void unpack_tq2_0(const uint8_t *block, uint8_t *q, float *s, float *m) {
    float d = qrt_half(block + 64);
    for (int plane = 0; plane < 8; plane++) {
        const uint8_t *qs = block + 32 * (plane / 4);
        s[plane] = d;
        m[plane] = 0;
        for (int i = 0; i < 32; i++) q[32 * plane + i] = qs[i] >> 2 * (plane % 4) & 3;
    }
}

INLINE void base3_digits(const uint8_t *p, int n, int digits, uint8_t *q) {
    uint8_t power = 1;
    for (int digit = 0; digit < digits; digit++, power = (uint8_t)(power * 3)) {
        for (int i = 0; i < n; i++) {
            uint8_t rest = (uint8_t)(p[i] * power);
            q[n * digit + i] = (uint8_t)(rest * 3 >> 8);
        }
    }
}

INLINE void unpack_tq1_0(const uint8_t *block, uint8_t *q, float *s, float *m) {
    float d = qrt_half(block + 52);
    for (int g = 0; g < 8; g++) s[g] = d;
    zero_floats(m, 8);
    base3_digits(block, 32, 5, q);
    base3_digits(block + 32, 16, 5, q + 160);
    base3_digits(block + 48, 4, 4, q + 240);
}
#endif
