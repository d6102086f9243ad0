// Products of tiles on tensor cores, int8 to int32, behind wrappers. A lane holds, with g = lane /
// 4 and t = lane % 4, four bytes a word:
//     a: [16][k] rows: a[0] row g, a[1] row g + 8, bytes 4 t ..; a[2], a[3] the same 16 bytes later
//     b: [8][k] rows:  b[0] row g, bytes 4 t ..; b[1] 16 bytes later
//     c: [16][8]:      c[0], c[1] row g, columns 2 t, 2 t + 1; c[2], c[3] row g + 8
#ifndef QRT_MMA_CUH
#define QRT_MMA_CUH
#include "common.cuh"

// The plain path: what the fragments mean, with words from other lanes. steps: 1 (k 16) or 2 (k
// 32).
INLINE void mma_plain(int (&c)[4], const int *a, const int *b, int steps) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int step = 0; step < steps; step++) {
        for (int from = 0; from < 4; from++) {
            int upper = __shfl_sync(ALL_LANES, a[2 * step], 4 * g + from);
            int lower = __shfl_sync(ALL_LANES, a[2 * step + 1], 4 * g + from);
            int left = __shfl_sync(ALL_LANES, b[step], 8 * t + from);
            int right = __shfl_sync(ALL_LANES, b[step], 8 * t + 4 + from);
            c[0] = dot4(upper, left, c[0]), c[1] = dot4(upper, right, c[1]);
            c[2] = dot4(lower, left, c[2]), c[3] = dot4(lower, right, c[3]);
        }
    }
}

// c += a . b over 32 columns
INLINE void mma_32(int (&c)[4], const int *a, const int *b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    mma_plain(c, a, b, 2);
#endif
}

// c += a . b over 16 columns: of a and b the first half
INLINE void mma_16(int (&c)[4], const int *a, const int *b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]));
#else
    mma_plain(c, a, b, 1);
#endif
}
#endif
