// Numbers to int8 in blocks of 32: d = max |x| / 127, q = x / d to nearest even.
#ifndef QRT_QUANTS_CUH
#define QRT_QUANTS_CUH
#include "common.cuh"

#define LARGEST 3.402823466e38f
#define INFINITE 0x7f800000u

// |x|, or infinity for what is no number: it must not become one.
INLINE float size_of(float x) {
    float a = fabsf(x);
    return a <= LARGEST ? a : float_of_bits(INFINITE);
}

// d of a block from its largest size. Below 2^-100 a block counts as zero: its d would be too
// coarse to divide by.
INLINE float unit_of(float most) {
    float d = most / 127.0f;
    if (d > LARGEST) return float_of_bits(0x7fc00000u);
    return d < 6.1629758220391547e-33f ? 0 : d;
}

INLINE int quantized(float x, float d) { return d > 0 ? (int)rintf(x / d) : 0; }

// A warp's 32 numbers become a block; all lanes take part.
INLINE void quantize_warp(float x, Quants *to) {
    int lane = threadIdx.x % 32;
    float d = unit_of(warp_max(size_of(x)));
    int q = quantized(x, d), sum = q;
    for (int m = 8; m; m >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, m);
    ((i8 *)to->q)[lane] = (i8)q;
    if (lane % 16 == 0) to->s[lane / 16] = d * (float)sum;
    if (lane == 0) to->d = d;
}
#endif
