// quantize: rows to int8 in blocks of 32, where the op that makes them cannot do so.
#include "quants.cuh"

// x: [T][cols]   out: [T][cols / 32]   grid: cols / 512, T   A thread takes 4 columns, 8 a block.
extern "C" __global__ void __launch_bounds__(128)
    quantize(const float *x, Quants *out, const int *step, int count, int cols) {
    int t = blockIdx.y, i = blockIdx.x * 128 + threadIdx.x;
    if (t >= step[count]) return;
    bool inside = 4 * i < cols; // lanes beyond take part in the shuffles
    float v[4], most = 0;
    for (int k = 0; k < 4; k++) {
        v[k] = inside ? x[(i64)t * cols + 4 * i + k] : 0;
        most = fmaxf(most, size_of(v[k]));
    }
    for (int lane = 4; lane; lane >>= 1) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, lane));
    float d = unit_of(most);
    int packed = 0, sum = 0;
    for (int k = 0; k < 4; k++) {
        int q = quantized(v[k], d);
        packed |= (q & 255) << 8 * k;
        sum += q;
    }
    for (int lane = 2; lane; lane >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, lane);
    int other = __shfl_xor_sync(ALL_LANES, sum, 4);
    if (!inside) return;
    Quants *to = out + (i64)t * (cols / 32) + i / 8;
    to->q[i % 8] = packed;
    if (i % 8 == 0) {
        to->d = d;
        to->s[0] = d * (float)sum;
        to->s[1] = d * (float)other;
    }
}
