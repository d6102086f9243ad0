// What a device can do at most, for benchmarks only: reads of memory, products on tensor cores.
#include "mma.cuh"

struct __align__(16) Words {
    u32 word[4];
};

// Reads n times 16 bytes once. x: [n]   out: [threads], so that nothing is left out
extern "C" __global__ void __launch_bounds__(256) read_words(const Words *x, u32 *out, int n) {
    int at = blockIdx.x * 256 + threadIdx.x, threads = gridDim.x * 256;
    u32 sum = 0;
    int i = at;
    for (; i + 3 * threads < n; i += 4 * threads) { // four loads under way
        Words a = x[i], b = x[i + threads], c = x[i + 2 * threads], d = x[i + 3 * threads];
        for (int j = 0; j < 4; j++) sum += a.word[j] ^ b.word[j] ^ c.word[j] ^ d.word[j];
    }
    for (; i < n; i += threads) sum += x[i].word[0] ^ x[i].word[1] ^ x[i].word[2] ^ x[i].word[3];
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

// The same of 16 x 16 and 16 x 8 bfloat16 with float32 sums; nothing where there are none.
extern "C" __global__ void __launch_bounds__(256) products_bf16(float *out, int rounds) {
    int at = blockIdx.x * 256 + threadIdx.x;
    float sum = 0, c[8][4] = {};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    u32 one = 0x3f803f80u + at % 7, a[4] = {one, one, one, one}, b[2] = {one, one};
    for (int round = 0; round < rounds; round++) {
#    pragma unroll
        for (int i = 0; i < 8; i++)
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
#else
    if (rounds < 0) c[0][0] = 1;
#endif
#pragma unroll
    for (int i = 0; i < 8; i++) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
    out[at] = sum;
}
