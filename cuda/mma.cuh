// Products of tiles on tensor cores, loads of their words, and copies to shared memory that nobody
// waits for, behind wrappers. A lane holds, with g = lane / 4 and t = lane % 4, words of four int8
// or of two 16-bit numbers:
//     a: [16][k] rows: a[0] row g, bytes 4 t ..; a[1] row g + 8; a[2], a[3] the same 16 bytes later
//     b: [8][k] rows:  b[0] row g, bytes 4 t ..; b[1] 16 bytes later
//     c: [16][8]:      c[0], c[1] row g, columns 2 t, 2 t + 1; c[2], c[3] row g + 8
#ifndef QRT_MMA_CUH
#define QRT_MMA_CUH
#include "common.cuh"

// The plain path: what the fragments mean, with words from other lanes. STEPS: of 16 bytes each.
// dot(a, b, c): c plus the products of the numbers in two words.
template <int STEPS, class C, class Dot>
INLINE void mma_plain(C (&c)[4], const int *a, const int *b, Dot dot) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll 1
        for (int from = 0; from < 4; from++) {
            int upper = __shfl_sync(ALL_LANES, a[2 * step], 4 * g + from);
            int lower = __shfl_sync(ALL_LANES, a[2 * step + 1], 4 * g + from);
            int left = __shfl_sync(ALL_LANES, b[step], 8 * t + from);
            int right = __shfl_sync(ALL_LANES, b[step], 8 * t + 4 + from);
            c[0] = dot(upper, left, c[0]), c[1] = dot(upper, right, c[1]);
            c[2] = dot(lower, left, c[2]), c[3] = dot(lower, right, c[3]);
        }
    }
}

// c += a . b over 32 columns of int8
INLINE void mma_32(int (&c)[4], const int *a, const int *b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    mma_plain<2>(c, a, b, [](int x, int y, int z) { return dot4(x, y, z); });
#endif
}

// c += a . b over 16 columns of int8: of a and b the first half
INLINE void mma_16(int (&c)[4], const int *a, const int *b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]));
#else
    mma_plain<1>(c, a, b, [](int x, int y, int z) { return dot4(x, y, z); });
#endif
}

// c += a . b over 16 columns of float16
INLINE void mma_f16(float (&c)[4], const int *a, const int *b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    mma_plain<2>(c, a, b, [](u32 x, u32 y, float z) {
        z = fmaf(half_to_float(x & 0xffff), half_to_float(y & 0xffff), z);
        return fmaf(half_to_float(x >> 16), half_to_float(y >> 16), z);
    });
#endif
}

// The words of b one by one.
INLINE void mma_f16(float (&c)[4], const int *a, int first, int second) {
    const int b[2] = {first, second};
    mma_f16(c, a, b);
}

// c += a . b over 16 columns of bfloat16
INLINE void mma_bf16(float (&c)[4], const int *a, const int *b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    mma_plain<2>(c, a, b, [](u32 x, u32 y, float z) {
        z = fmaf(bf16_to_float(x & 0xffff), bf16_to_float(y & 0xffff), z);
        return fmaf(float_of_bits(x & 0xffff0000u), float_of_bits(y & 0xffff0000u), z);
    });
#endif
}

// Two numbers in one word, the first below, each to nearest, ties to even.
INLINE u32 f16_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
#else
    return float_to_half(first) | (u32)float_to_half(second) << 16;
#endif
}

INLINE u32 bf16_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
#else
    u32 u[2] = {__float_as_uint(first), __float_as_uint(second)};
    for (int i = 0; i < 2; i++) // a NaN stays one
        u[i] =
            (u[i] & 0x7fffffff) > 0x7f800000 ? u[i] | 0x400000 : u[i] + 0x7fff + (u[i] >> 16 & 1);
    return u[0] >> 16 | (u[1] & 0xffff0000u);
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
INLINE u32 shared_address(const void *p) {
    u32 at;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(at) : "l"(p));
    return at;
}
#endif

// Copies 16 bytes to shared memory; there after await_copies() and a barrier. Both addresses are
// multiples of 16.
INLINE void copy_ahead(void *to, const void *from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    // The address is made here, as it would stay in a register for long.
    asm volatile("{ .reg .u64 s; .reg .u32 t; cvta.to.shared.u64 s, %0; cvt.u32.u64 t, s; "
                 "cp.async.cg.shared.global [t], [%1], 16; }"
                 :
                 : "l"(to), "l"(from)
                 : "memory");
#else
    *(Words *)to = *(const Words *)from;
#endif
}

// For those that this thread began.
INLINE void await_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// The 16 x 16 numbers of 16 bits at `tile` in shared memory, rows of ld numbers (a multiple of 8),
// as an a; as two b: r[0], r[2] of rows 0 .., r[1], r[3] of rows 8 ...
INLINE void load_tile(int (&r)[4], const u16 *tile, int ld) {
    const int lane = threadIdx.x % 32;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(tile + lane % 16 * ld + lane / 16 * 8))
                 : "memory");
#else
    for (int i = 0; i < 4; i++)
        r[i] = *(const int *)(tile + (lane / 4 + i % 2 * 8) * ld + lane % 4 * 2 + i / 2 * 8);
#endif
}

// The same with rows and columns exchanged, as two b: r[0], r[1] of columns 0 .., r[2], r[3] of
// columns 8 ...
INLINE void load_tile_turned(int (&r)[4], const u16 *tile, int ld) {
    const int lane = threadIdx.x % 32;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(tile + lane % 16 * ld + lane / 16 * 8))
                 : "memory");
#else
    for (int i = 0; i < 4; i++) {
        const u16 *from = tile + (lane % 4 * 2 + i % 2 * 8) * ld + lane / 4 + i / 2 * 8;
        r[i] = (int)(from[0] | (u32)from[ld] << 16);
    }
#endif
}
#endif
