// What all kernels share: types, the step's description, reductions, wrappers of hardware features.
// Each wrapper has a plain path for where __CUDA_ARCH__ is not defined or too low.
#ifndef QRT_COMMON_CUH
#define QRT_COMMON_CUH

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define INLINE __device__ __forceinline__
#define ALL_LANES 0xffffffffu

// What a load or store can have at most.
struct __align__(16) Words {
    u32 w[4];
};

#ifndef QRT_DYN_SMEM
#    define QRT_DYN_SMEM(T, name)                                                                  \
        extern __shared__ __align__(16) unsigned char qrt_smem[];                                  \
        T *name = (T *)qrt_smem
#endif

// A step, as one int32 array: these numbers, then sections that begin where the AT_ numbers say.
// memory.py writes it. Counts are read on the device, so that a captured graph serves any step that
// its grid covers.
enum {
    N_ROWS,      // token rows
    N_SEQS,      // sequences
    N_OUTS,      // rows whose logits are wanted
    N_SAVES,     // states that are saved
    PAGE_WIDTH,  // entries of a sequence in the page table
    AT_TOKENS,   // [rows]
    AT_POSITION, // [3][rows]
    AT_OFFSETS,  // [seqs + 1] first row of each sequence
    AT_STARTS,   // [seqs] tokens before the step
    AT_SLOTS,    // [seqs] where the state goes
    AT_SOURCES,  // [seqs] where the state comes from
    AT_PAGES,    // [seqs][PAGE_WIDTH]
    AT_OUTS,     // [outs] rows
    AT_SAVES,    // [saves] rows after which the state is saved, rising
    AT_SAVED,    // [saves] slots
    AT_SEQ,      // [rows] sequence of each row
    HEADER
};

INLINE const int *section(const int *step, int at) { return step + step[at]; }

// ------------------------------------------------------------------------------------ numbers

INLINE float float_of_bits(u32 bits) { return __uint_as_float(bits); }

INLINE float half_to_float(u32 h) {
#ifdef __CUDA_ARCH__
    float f;
    asm("{ .reg .b16 t; cvt.u16.u32 t, %1; cvt.f32.f16 %0, t; }" : "=f"(f) : "r"(h));
    return f;
#else
    u32 sign = (h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
    if (e == 0) {
        float f = (float)m * 5.9604644775390625e-8f;
        return sign ? -f : f;
    }
    return float_of_bits(sign | (e == 31 ? 0x7f800000u : (e + 112) << 23) | m << 13);
#endif
}

// To nearest, ties to even.
INLINE u16 float_to_half(float f) {
#ifdef __CUDA_ARCH__
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
#else
    u32 u = __float_as_uint(f), sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000) return (u16)(sign | 0x7e00);
    if (u >= 0x477ff000) return (u16)(sign | 0x7c00);
    if (u < 0x38800000) return (u16)(sign | (u32)rintf(float_of_bits(u) * 16777216.0f));
    return (u16)(sign | ((u + 0xfff + (u >> 13 & 1)) - 0x38000000) >> 13);
#endif
}

INLINE float bf16_to_float(u32 h) { return float_of_bits(h << 16); }

// Sum of the products of four signed bytes, added to c.
INLINE int dot4(int a, int b, int c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 610
    return __dp4a(a, b, c);
#else
    for (int i = 0; i < 32; i += 8) c += (int)(i8)(a >> i) * (int)(i8)(b >> i);
    return c;
#endif
}

// Four of the eight bytes of b:a, by four selectors of three bits.
INLINE u32 pick_bytes(u32 a, u32 b, u32 selectors) {
#ifdef __CUDA_ARCH__
    return __byte_perm(a, b, selectors);
#else
    u64 both = (u64)b << 32 | a;
    u32 out = 0;
    for (int i = 0; i < 4; i++) out |= (u32)(both >> 8 * (selectors >> 4 * i & 7) & 255) << 8 * i;
    return out;
#endif
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
INLINE float silu(float x) { return x / (1.0f + expf(-x)); }

// ------------------------------------------------------------------------------------ reductions
// Butterflies: every lane ends with the same bits. All lanes of a warp take part.

INLINE float warp_sum(float v) {
    for (int lane = 16; lane; lane >>= 1) v += __shfl_xor_sync(ALL_LANES, v, lane);
    return v;
}

INLINE float warp_max(float v) {
    for (int lane = 16; lane; lane >>= 1) v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, lane));
    return v;
}

// Sums of N values (a power of two up to 32) at once, each of which is added up as in warp_sum. A
// lane ends with one of them: number lane / (32 / N).
template <int N, int LANES = 16> INLINE float warp_sums(float (&v)[N]) {
    if constexpr (N == 1) {
        for (int lanes = LANES; lanes; lanes >>= 1) v[0] += __shfl_xor_sync(ALL_LANES, v[0], lanes);
        return v[0];
    } else { // half the lanes go on with half of the values
        const bool upper = threadIdx.x & LANES;
        float half[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            float keep = upper ? v[i + N / 2] : v[i], give = upper ? v[i] : v[i + N / 2];
            half[i] = keep + __shfl_xor_sync(ALL_LANES, give, LANES);
        }
        return warp_sums<N / 2, LANES / 2>(half);
    }
}

// Over all threads of a block; part: shared, a float for each warp. Not to be used twice with the
// same memory without a barrier between.
INLINE float block_sum(float v, float *part) {
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0;
    for (int w = 0; w < (int)blockDim.x / 32; w++) sum += part[w];
    return sum;
}

// 32 columns of a row that meets quantised weights: x = d * q; s: d times the sums of 16.
struct __align__(16) Quants {
    int q[8];
    float d, s[2], unused;
};
#endif
