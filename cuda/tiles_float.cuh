// Tiles of F16 and BF16 weights and float32 rows of x; see tiles.cuh. cols: multiples of 32.
// A number of x becomes two of the weights' type, high and low, whose sum differs from it by at
// most 2^-18 of its size (BF16), or 2^-22 of it or 2^-39 of the largest of 16 columns (F16). F16
// cannot hold every size: there 16 columns share a power of two. A product of 16 columns is added
// up on the tensor core, then joins a float32 sum.
#ifndef QRT_TILES_FLOAT_CUH
#define QRT_TILES_FLOAT_CUH

typedef float tile_input;

// Rows are longer than their 32 columns: those of fragments lie in different banks.
template <int TILE> struct Tiles {
    static const int COLUMNS = 32; // at once
    int w[2][TILE][20];
    float x[2][TILE][40];
};

struct __align__(8) Two {
    float a, b;
};

template <int TILE>
INLINE void fetch(Tiles<TILE> &tiles, const Matrix &m, const Places &p, const float *x, int first,
                  int cols) {
    const int half = first / 32 % 2, threads = 2 * TILE;
#pragma unroll 1 // fewer registers for addresses
    for (int i = threadIdx.x; i < 4 * TILE; i += threads) {
        const int r = i / 4, part = i % 4; // of 16 bytes
        const Words *from = (const Words *)(weight_row(m, r) + 2 * (i64)first);
        copy_ahead((Words *)tiles.w[half][r] + part, from + part);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < 8 * TILE; i += threads) {
        const int r = i / 8, part = i % 8;
        if (r >= p.count) continue;
        const Words *from = (const Words *)(x + (i64)x_row(p, r) * cols + first);
        copy_ahead((Words *)tiles.x[half][r] + part, from + part);
    }
}

#ifdef QRT_F16
INLINE u32 pair_of(float a, float b) { return f16_pair(a, b); }
INLINE float number_of(u32 h) { return half_to_float(h); }
INLINE void mma_pairs(float (&c)[4], const int *a, const int *b) { mma_f16(c, a, b); }

// Brings the largest of a row's 16 columns, four of which each of four lanes has, to 2^14 or more,
// below 2^15. Returns what undoes it.
INLINE float scale_row(float (&v)[4]) {
    float most = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
    most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
    most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
    u32 exponent = __float_as_uint(most) >> 23;
    if (exponent < 15) exponent = 15; // numbers below 2^-112: they lose bits
#    pragma unroll
    for (int i = 0; i < 4; i++) v[i] *= float_of_bits((268 - exponent) << 23);
    return float_of_bits((exponent - 14) << 23);
}
#else
INLINE u32 pair_of(float a, float b) { return bf16_pair(a, b); }
INLINE float number_of(u32 h) { return bf16_to_float(h); }
INLINE void mma_pairs(float (&c)[4], const int *a, const int *b) { mma_bf16(c, a, b); }
INLINE float scale_row(float (&)[4]) { return 1; } // it holds every size
#endif

template <int TILE>
INLINE void multiply(const Tiles<TILE> &tiles, int from, int, int count, Sums<TILE> &sum) {
    const int half = from / 32 % 2, g = threadIdx.x % 32 / 4, k = threadIdx.x % 4;
    const int row0 = lane_row<TILE>(), x0 = warp_x();
#pragma unroll 1
    for (int step = 0; step < 2; step++) { // 16 columns each
        const int (*w)[20] = tiles.w[half] + row0;
        int a[TILE / 32][4];
#pragma unroll
        for (int m = 0; m < TILE / 32; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[m][i] = w[16 * m + 8 * (i % 2)][8 * step + k + 4 * (i / 2)];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (x0 + 8 * j >= count) continue; // the same for all lanes of a warp
            const float *x = tiles.x[half][x0 + 8 * j + g] + 16 * step + 2 * k;
            const Two first = *(const Two *)x, second = *(const Two *)(x + 8);
            float v[4] = {first.a, first.b, second.a, second.b};
            const float scale = scale_row(v);
            int high[2], low[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 both = pair_of(v[2 * i], v[2 * i + 1]);
                high[i] = (int)both;
                low[i] = (int)pair_of(v[2 * i] - number_of(both & 0xffff),
                                      v[2 * i + 1] - number_of(both >> 16));
            }
#ifdef QRT_F16
            const float left = __shfl_sync(ALL_LANES, scale, 8 * k); // of the sums' columns
            const float right = __shfl_sync(ALL_LANES, scale, 8 * k + 4);
#else
            const float left = scale, right = scale;
#endif
#pragma unroll
            for (int m = 0; m < TILE / 32; m++) {
                float c[4] = {0, 0, 0, 0};
                mma_pairs(c, a[m], low);
                mma_pairs(c, a[m], high);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sum[m][j][i] = fmaf(i % 2 ? right : left, c[i], sum[m][j][i]);
            }
        }
    }
}
#endif
