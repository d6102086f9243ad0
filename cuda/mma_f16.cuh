// Products of tiles on tensor cores, float16 to float32, and copies to shared memory that need no
// registers, behind wrappers. A lane holds, with g = lane / 4 and t = lane % 4, two numbers a word:
//     a: [16][16] rows: a[0] row g, columns 2 t, 2 t + 1; a[1] row g + 8; a[2], a[3] the same 8
//        columns later
//     b: [8][16] rows:  first row g, columns 2 t, 2 t + 1; second 8 columns later
//     c: [16][8]:       c[0], c[1] row g, columns 2 t, 2 t + 1; c[2], c[3] row g + 8
#ifndef QRT_MMA_F16_CUH
#define QRT_MMA_F16_CUH
#include "common.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#    define QRT_MMA_F16 1
#endif

struct __align__(16) Sixteen {
    u32 word[4];
};

INLINE u32 pack(u16 first, u16 second) { return (u32)second << 16 | first; }

// The sum of both products of two words.
INLINE float dot2(u32 a, u32 b, float c) {
    c = fmaf(half_to_float(a & 0xffff), half_to_float(b & 0xffff), c);
    return fmaf(half_to_float(a >> 16), half_to_float(b >> 16), c);
}

// c += a . b; the plain path fetches words from other lanes.
INLINE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 first, u32 second) {
#ifdef QRT_MMA_F16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(first), "r"(second));
#else
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u64 near = (u64)a[1] << 32 | a[0], far = (u64)a[3] << 32 | a[2];
    const u64 both = (u64)second << 32 | first;
#    pragma unroll 1
    for (int from = 0; from < 4; from++) {
        const u64 rows[2] = {__shfl_sync(ALL_LANES, near, 4 * g + from),
                             __shfl_sync(ALL_LANES, far, 4 * g + from)};
        const u64 left = __shfl_sync(ALL_LANES, both, 8 * t + from);
        const u64 right = __shfl_sync(ALL_LANES, both, 8 * t + 4 + from);
        for (int i = 0; i < 4; i++) {
            const u64 b = i % 2 ? right : left;
            c[i] = dot2((u32)(rows[0] >> i / 2 * 32), (u32)b, c[i]);
            c[i] = dot2((u32)(rows[1] >> i / 2 * 32), (u32)(b >> 32), c[i]);
        }
    }
#endif
}

#ifdef QRT_MMA_F16
INLINE u32 shared_address(const void *p) {
    u32 at;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(at) : "l"(p));
    return at;
}
#endif

// The 16 x 16 numbers at `tile` in shared memory, rows of ld numbers (a multiple of 8), as an a; as
// two b: r[0], r[2] of rows 0 .., r[1], r[3] of rows 8 ...
INLINE void load_tile(u32 (&r)[4], const u16 *tile, int ld) {
    const int lane = threadIdx.x % 32;
#ifdef QRT_MMA_F16
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(tile + lane % 16 * ld + lane / 16 * 8))
                 : "memory");
#else
    for (int i = 0; i < 4; i++)
        r[i] = *(const u32 *)(tile + (lane / 4 + i % 2 * 8) * ld + lane % 4 * 2 + i / 2 * 8);
#endif
}

// The same with rows and columns exchanged, as two b: r[0], r[1] of columns 0 .., r[2], r[3] of
// columns 8 ...
INLINE void load_tile_turned(u32 (&r)[4], const u16 *tile, int ld) {
    const int lane = threadIdx.x % 32;
#ifdef QRT_MMA_F16
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(tile + lane % 16 * ld + lane / 16 * 8))
                 : "memory");
#else
    for (int i = 0; i < 4; i++) {
        const u16 *from = tile + (lane % 4 * 2 + i % 2 * 8) * ld + lane / 4 + i / 2 * 8;
        r[i] = pack(from[0], from[ld]);
    }
#endif
}

// 16 bytes to shared memory, there after wait_for_copies and a barrier. Both addresses are
// multiples of 16.
INLINE void copy_16(void *shared, const void *from) {
#ifdef QRT_MMA_F16
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :
                 : "r"(shared_address(shared)), "l"(from)
                 : "memory");
#else
    *(Sixteen *)shared = *(const Sixteen *)from;
#endif
}

// For those that this thread began.
INLINE void wait_for_copies() {
#ifdef QRT_MMA_F16
    asm volatile("cp.async.wait_all;" : : : "memory");
#endif
}
#endif
