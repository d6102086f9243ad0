// Four-bit floats (E2M1, stored doubled as integers) under scales of eight bits.
// MXFP4: e (E8M0), qs[16]. NVFP4: four scales (UE4M3), qs[32], where 8 bytes hold 16 elements.
#ifndef QRT_UNPACK_FP4_H
#define QRT_UNPACK_FP4_H
#include "common.h"

INLINE float half_e8m0(uint8_t e) { // 2^(e - 128); below 2 that is a subnormal
    return float_of_bits(e > 1 ? (uint32_t)(e - 1) << 23 : 0x200000u << e);
}

INLINE float half_ue4m3(uint8_t x) { // the sign bit is not used; 0 and the NaN code give 0
    int e = x >> 3 & 15, mantissa = x & 7;
    if (x == 0 || x == 127) return 0;
    if (e == 0) return (float)mantissa * 0x1p-10f;
    return float_of_bits((uint32_t)(e + 119) << 23 | (uint32_t)mantissa << 20);
}

INLINE void unpack_mxfp4(const uint8_t *block, uint8_t *q, float *s, float *m) {
    *s = half_e8m0(block[0]);
    *m = 0;
    lookup_nibbles(fp4_values, block + 1, 16, q);
}

INLINE void unpack_nvfp4(const uint8_t *block, uint8_t *q, float *s, float *m) {
    for (int i = 0; i < 4; i++) {
        s[i] = half_ue4m3(block[i]);
        m[i] = 0;
        lookup_nibbles(fp4_values, block + 4 + 8 * i, 8, q + 16 * i);
    }
}
#endif
