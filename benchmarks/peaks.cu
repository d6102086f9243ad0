// What a device can do at most, for benchmarks only: reads of memory, products on tensor cores.
#include "mma.cuh"

// Reads n times 16 bytes once. x: [n]   out: [threads], so that nothing is left out
extern "C" __global__ void __launch_bounds__(256) read_words(const Words *x, u32 *out, int n) {
    int at = blockIdx.x * 256 + threadIdx.x, threads = gridDim.x * 256;
    u32 sum = 0;
    int i = at;
    for (; i + 3 * threads < n; i += 4 * threads) { // four loads under way
        Words a = x[i], b = x[i + threads], c = x[i + 2 * threads], d = x[i + 3 * threads];
        for (int j = 0; j < 4; j++) sum += a.w[j] ^ b.w[j] ^ c.w[j] ^ d.w[j];
    }
    for (; i < n; i += threads) sum += x[i].w[0] ^ x[i].w[1] ^ x[i].w[2] ^ x[i].w[3];
    out[at] = sum;
}

// rounds times 8 independent products of 16 x 32 and 32 x 8 int8. out: [threads]
extern "C" __global__ void __launch_bounds__(256) products_int8(int *out, int rounds) {
    int at = blockIdx.x * 256 + threadIdx.x, sum = 0;
    int a[4] = {at, at ^ 1, at ^ 2, at ^ 3}, b[2] = {at, ~at};
    int c[8][4] = {};
    for (int round = 0; round < rounds; round++) {
#pragma unroll
        for (int i = 0; i < 8; i++) mma_32(c[i], a, b);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
    out[at] = sum;
}

// The same of 16 x 16 and 16 x 8 bfloat16 with float32 sums.
extern "C" __global__ void __launch_bounds__(256) products_bf16(float *out, int rounds) {
    int at = blockIdx.x * 256 + threadIdx.x, one = 0x3f803f80 + at % 7;
    int a[4] = {one, one, one, one}, b[2] = {one, one};
    float sum = 0, c[8][4] = {};
    for (int round = 0; round < rounds; round++) {
#pragma unroll
        for (int i = 0; i < 8; i++) mma_bf16(c[i], a, b);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
    out[at] = sum;
}
