// attention for sequences of many rows, over float16 pages, on tensor cores: a block works on
// TILE_QUERIES queries of one kv head, TILE_KEYS keys at a time, with a running maximum. Queries
// and weights are split into two float16 numbers each, the second what the first leaves out, so
// that products with keys and values (which are float16) are as good as those of float32.
#include "mma.cuh"
#include "pages.cuh"
#include "queries.cuh"

#define TILE_QUERIES 32
#define TILE_KEYS 64
#define WEIGHTS_LD (TILE_KEYS + 8)
#define NEVER -1e30f
// The largest weight: with 1 the many small ones behind a large one would be lost in float16.
#define LARGEST 32768.0f

// x as a float16 number and what it leaves out.
INLINE void split(float x, u16 &high, u16 &low) {
    x = fminf(fmaxf(x, -65504.0f), 65504.0f);
    high = float_to_half(x);
    low = float_to_half(x - half_to_float(high));
}

// TILE_KEYS rows of a pool from token `key` of the sequence on; rows from `end` on are 0.
// to: [TILE_KEYS][ld]
template <int DIM>
INLINE void load_rows(const kept *from, const Pool &pool, const int *pages, int head, int key,
                      int end, u16 *to, int ld) {
#pragma unroll 1
    for (int i = threadIdx.x; i < TILE_KEYS * (DIM / 8); i += 128) {
        const int row = i / (DIM / 8), d = i % (DIM / 8) * 8, at = key + row;
        u16 *place_to = to + row * ld + d;
        if (at < end) {
            copy_ahead(place_to,
                       from + place(pool, pages[at / pool.tokens], head, at % pool.tokens) + d);
        } else {
            *(Words *)place_to = {{0, 0, 0, 0}};
        }
    }
}

// Over the four lanes that share rows of a product.
INLINE float quad_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, 1));
    return fmaxf(v, __shfl_xor_sync(ALL_LANES, v, 2));
}
INLINE float quad_sum(float v) {
    v += __shfl_xor_sync(ALL_LANES, v, 1);
    return v + __shfl_xor_sync(ALL_LANES, v, 2);
}

// q: [T, heads, DIM] view   out: [T, heads * DIM]   from: rows of the shortest sequence served here
// grid: tiles, kv_heads   shared: ((2 * TILE_QUERIES + TILE_KEYS) * (DIM + 8) + 2 * TILE_QUERIES *
// WEIGHTS_LD) numbers of 2 bytes
// A pair of warps has 16 queries: of a score product each has half of the keys, of a sum of values
// half of the columns.
template <int DIM>
INLINE void attend(const float *q, int ld, int offset, int stride, const kept *keys,
                   const kept *values, float *out, const int *step, int layer, int pages,
                   int kv_heads, int tokens, int heads, int from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    asm volatile("trap;"); // never launched there: attention.cu serves sequences of any length
#else
    QRT_DYN_SMEM(u16, shared);
    const int LD = DIM + 8; // rows of fragments lie in different banks
    u16 *queries = shared, *rows = queries + 2 * TILE_QUERIES * LD;
    u16 *weights = rows + TILE_KEYS * LD; // [2][TILE_QUERIES][WEIGHTS_LD]
    const int group = heads / kv_heads, kv_head = blockIdx.y;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, side = warp % 2, t = lane % 4;
    const Tile tile = tile_of(step, blockIdx.x, group, TILE_QUERIES, from, 0x7fffffff);
    if (tile.seq < 0) return;
    const Pool pool = {layer, pages, kv_heads, tokens, DIM};
    const int *own_pages = section(step, AT_PAGES) + tile.seq * step[PAGE_WIDTH];
    const int start = section(step, AT_STARTS)[tile.seq];
    const int row0 = section(step, AT_OFFSETS)[tile.seq];
    // Keys that the last query sees.
    const int end = start + (tile.first + tile.count - 1) / group + 1;

    for (int i = warp; i < TILE_QUERIES; i += 4) {
        const int n = tile.first + i;
        const float *x =
            q + (i64)(row0 + n / group) * ld + offset + (kv_head * group + n % group) * stride;
        u16 *to = queries + i * LD;
        for (int d = lane; d < DIM; d += 32)
            split(i < tile.count ? x[d] : 0, to[d], to[TILE_QUERIES * LD + d]);
    }
    const float scale = 1.0f / sqrtf((float)DIM);
    // Queries query, query + 8 of the tile; what they see last; where both warps of a pair leave
    // what concerns these: behind their weights.
    const int query = warp / 2 * 16 + lane / 4;
    int seen[2];
    float top[2], total[2], sum[DIM / 16][4];
#    pragma unroll
    for (int i = 0; i < 2; i++) {
        seen[i] = start + (tile.first + query + 8 * i) / group;
        top[i] = NEVER, total[i] = 0;
    }
#    pragma unroll
    for (int i = 0; i < DIM / 4; i++) sum[i / 4][i % 4] = 0;
    float *exchange = (float *)(weights + query * WEIGHTS_LD + TILE_KEYS);
    const int next = 8 * WEIGHTS_LD / 2; // from the first query's floats to the second's

    for (int key = 0; key < end; key += TILE_KEYS) {
        __syncthreads(); // the values before are no longer needed
        load_rows<DIM>(keys, pool, own_pages, kv_head, key, end, rows, LD);
        await_copies();
        __syncthreads();
        float score[4][4];
#    pragma unroll
        for (int i = 0; i < 16; i++) score[i / 4][i % 4] = 0;
        const u16 *a = queries + warp / 2 * 16 * LD, *b = rows + side * 32 * LD;
#    pragma unroll 1
        for (int d = 0; d < DIM; d += 16) {
            int high[4], low[4];
            load_tile(high, a + d, LD);
            load_tile(low, a + TILE_QUERIES * LD + d, LD);
#    pragma unroll
            for (int j = 0; j < 2; j++) {
                int k[4];
                load_tile(k, b + j * 16 * LD + d, LD);
                mma_f16(score[2 * j], high, k[0], k[2]);
                mma_f16(score[2 * j + 1], high, k[1], k[3]);
                mma_f16(score[2 * j], low, k[0], k[2]);
                mma_f16(score[2 * j + 1], low, k[1], k[3]);
            }
        }
        const int first = key + side * 32 + 2 * t;
        float most[2] = {NEVER, NEVER};
#    pragma unroll
        for (int i = 0; i < 16; i++) {
            const int j = i / 4, e = i % 4;
            float &x = score[j][e];
            // A row sees the keys up to its own.
            x = first + 8 * j + e % 2 <= seen[e / 2] ? x * scale : NEVER;
            most[e / 2] = fmaxf(most[e / 2], x);
        }
#    pragma unroll
        for (int i = 0; i < 2; i++) {
            most[i] = quad_max(most[i]);
            if (t == 0) exchange[i * next + side] = most[i];
        }
        __syncthreads(); // the keys are no longer needed
        load_rows<DIM>(values, pool, own_pages, kv_head, key, end, rows, LD);
        float factor[2];
#    pragma unroll
        for (int i = 0; i < 2; i++) {
            float high = fmaxf(top[i], fmaxf(exchange[i * next], exchange[i * next + 1]));
            factor[i] = expf(top[i] - high);
            top[i] = high;
            total[i] *= factor[i];
        }
#    pragma unroll
        for (int i = 0; i < 8; i++) { // two keys
            const int j = i / 2, half = i % 2;
            u16 high[2], low[2];
#    pragma unroll
            for (int e = 0; e < 2; e++) {
                float x = score[j][2 * half + e];
                float weight = x == NEVER ? 0 : expf(x - top[half]) * LARGEST;
                total[half] += weight;
                split(weight, high[e], low[e]);
            }
            u16 *to = weights + (query + 8 * half) * WEIGHTS_LD + side * 32 + 8 * j + 2 * t;
            *(u32 *)to = high[0] | (u32)high[1] << 16;
            *(u32 *)(to + TILE_QUERIES * WEIGHTS_LD) = low[0] | (u32)low[1] << 16;
        }
#    pragma unroll
        for (int i = 0; i < DIM / 4; i++) sum[i / 4][i % 4] *= factor[i / 2 % 2];
        await_copies();
        __syncthreads();
        const u16 *w = weights + warp / 2 * 16 * WEIGHTS_LD, *v = rows + side * (DIM / 2);
#    pragma unroll 1
        for (int k = 0; k < TILE_KEYS; k += 16) {
            int high[4], low[4];
            load_tile(high, w + k, WEIGHTS_LD);
            load_tile(low, w + TILE_QUERIES * WEIGHTS_LD + k, WEIGHTS_LD);
#    pragma unroll
            for (int j = 0; j < DIM / 32; j++) {
                int x[4];
                load_tile_turned(x, v + k * LD + 16 * j, LD);
                mma_f16(sum[2 * j], high, x[0], x[1]);
                mma_f16(sum[2 * j + 1], high, x[2], x[3]);
                mma_f16(sum[2 * j], low, x[0], x[1]);
                mma_f16(sum[2 * j + 1], low, x[2], x[3]);
            }
        }
    }
#    pragma unroll
    for (int i = 0; i < 2; i++) {
        total[i] = quad_sum(total[i]);
        if (t == 0) exchange[i * next + 2 + side] = total[i];
    }
    __syncthreads();
#    pragma unroll
    for (int i = 0; i < 2; i++) {
        const int n = tile.first + query + 8 * i;
        if (query + 8 * i >= tile.count) continue;
        const float whole = 1.0f / (exchange[i * next + 2] + exchange[i * next + 3]);
        float *to = out + ((i64)(row0 + n / group) * heads + kv_head * group + n % group) * DIM +
                    side * (DIM / 2) + 2 * t;
#    pragma unroll
        for (int j = 0; j < DIM / 16; j++) {
            to[8 * j] = sum[j][2 * i] * whole;
            to[8 * j + 1] = sum[j][2 * i + 1] * whole;
        }
    }
#endif
}

#define ATTENTION_TILES(DIM)                                                                       \
    extern "C" __global__ void __launch_bounds__(128)                                              \
        attention_tiles_##DIM(const float *q, int ld, int offset, int stride, const kept *keys,    \
                              const kept *values, float *out, const int *step, int layer,          \
                              int pages, int kv_heads, int tokens, int heads, int from) {          \
        attend<DIM>(q, ld, offset, stride, keys, values, out, step, layer, pages, kv_heads,        \
                    tokens, heads, from);                                                          \
    }
ATTENTION_TILES(64)
ATTENTION_TILES(128)
ATTENTION_TILES(256)
