// quantize: rows to int8 in blocks of 32, for products with quantised weights.
#include "common.cuh"

// x: [T][cols]   out: [T][cols / 32]   grid: cols / 512, T   A thread takes 4 columns, 8 a block.
extern "C" __global__ void __launch_bounds__(128)
    quantize(const float *x, Quants *out, const int *step, int count, int cols) {
    int t = blockIdx.y, i = blockIdx.x * 128 + threadIdx.x;
    if (t >= step[count]) return;
    bool inside = 4 * i < cols; // lanes beyond take part in the shuffles
    float v[4];
    for (int k = 0; k < 4; k++) v[k] = inside ? x[(i64)t * cols + 4 * i + k] : 0;
    float most = 0;
    bool bad = false; // a NaN or an infinity, which must not become a number
    for (int k = 0; k < 4; k++) {
        float a = fabsf(v[k]);
        bad = bad || !(a <= 3.402823466e38f);
        most = fmaxf(most, a);
    }
    if (bad) most = float_of_bits(0x7f800000u);
    for (int lane = 4; lane; lane >>= 1) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, lane));
    // Below 2^-100 a block counts as zero: its d would be too coarse to divide by.
    float d = most / 127.0f, safe = d > 3.402823466e38f ? float_of_bits(0x7fc00000u) : d;
    bool zero = !(d >= 6.1629758220391547e-33f) || safe != safe;
    int packed = 0, sum = 0;
    for (int k = 0; k < 4; k++) {
        int q = zero ? 0 : (int)rintf(v[k] / d);
        packed |= (q & 255) << 8 * k;
        sum += q;
    }
    for (int lane = 2; lane; lane >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, lane);
    int other = __shfl_xor_sync(ALL_LANES, sum, 4);
    if (!inside) return;
    if (d < 6.1629758220391547e-33f) safe = 0;
    Quants *to = out + (i64)t * (cols / 32) + i / 8;
    to->q[i % 8] = packed;
    if (i % 8 == 0) {
        to->d = safe;
        to->s[0] = safe * (float)sum;
        to->s[1] = safe * (float)other;
    }
}
