// attention: causal softmax attention over pages, without a score matrix. A block works on up to 16
// queries of one kv head, 32 keys at a time, with a running maximum. Sums of PIECE keys are joined
// in order, in one block or (split) by attention_merge: a row's result is the same both ways and in
// any step.
#include "pages.cuh"
#include "queries.cuh"

#define QUERIES 16     // of a block
#define OWN 4          // of a warp
#define CHUNK 32       // keys at once, one for each lane
#define PIECE 128      // keys whose sums are joined to those before
#define LANES_OF_DIM 8 // columns of a lane: dim / 32, at most
#define NEVER -1e30f

struct Running {
    float top, total, sum[LANES_OF_DIM];
};

INLINE void clear(Running &r) {
    r.top = NEVER, r.total = 0;
#pragma unroll
    for (int j = 0; j < LANES_OF_DIM; j++) r.sum[j] = 0;
}

// Joins a later piece to those before it.
INLINE void join(Running &all, float top, float total, const float (&sum)[LANES_OF_DIM]) {
    float high = fmaxf(all.top, top), a = expf(all.top - high), b = expf(top - high);
    all.top = high;
    all.total = fmaf(total, b, __fmul_rn(all.total, a));
#pragma unroll
    for (int j = 0; j < LANES_OF_DIM; j++) all.sum[j] = fmaf(sum[j], b, __fmul_rn(all.sum[j], a));
}

INLINE void finish(const Running &all, float *out, int dim) {
    float scale = 1.0f / all.total;
#pragma unroll
    for (int j = 0; j < LANES_OF_DIM; j++) {
        int d = threadIdx.x % 32 + 32 * j;
        if (d < dim) out[d] = all.sum[j] * scale;
    }
}

// CHUNK rows of a pool from token `key` of the sequence on, as floats; rows from `end` on are 0.
// to: [CHUNK][ld]
INLINE void load_rows(const kept *from, const Pool &pool, const int *pages, int head, int key,
                      int end, float *to, int ld) {
    for (int i = threadIdx.x / 32; i < CHUNK; i += blockDim.x / 32) {
        int at = key + i;
        const kept *row =
            from + (at < end ? place(pool, pages[at / pool.tokens], head, at % pool.tokens) : 0);
#ifndef QRT_KV_F32
        if (pool.dim % 2 == 0) { // two numbers a lane: a warp asks for 128 bytes
            for (int d = threadIdx.x % 32 * 2; d < pool.dim; d += 64) {
                const u32 both = at < end ? *(const u32 *)(row + d) : 0;
                to[i * ld + d] = loaded(both & 0xffff), to[i * ld + d + 1] = loaded(both >> 16);
            }
            continue;
        }
#endif
        for (int d = threadIdx.x % 32; d < pool.dim; d += 32)
            to[i * ld + d] = at < end ? loaded(row[d]) : 0;
    }
}

// q: [T, heads, dim] view   out: [T, heads * dim]
// split 0: out is written, grid: tiles, kv_heads   split 1: a block takes one piece and writes its
// sums to parts [(row * heads + head) * pieces + piece][dim + 2] (top, total behind them),
// grid: tiles, kv_heads, pieces
// below: sequences of so many rows and more are left out (attention_tiles.cu)
// shared: (QUERIES * dim + CHUNK * (dim + 1) + QUERIES * CHUNK) floats
extern "C" __global__ void __launch_bounds__(128)
    attention(const float *q, int ld, int offset, int stride, const kept *keys, const kept *values,
              float *out, float *parts, const int *step, int layer, int pages, int kv_heads,
              int tokens, int dim, int heads, int below, int split) {
    QRT_DYN_SMEM(float, shared);
    float *queries = shared, *rows = queries + QUERIES * dim, *weights = rows + CHUNK * (dim + 1);
    const int group = heads / kv_heads, kv_head = blockIdx.y;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Tile tile = tile_of(step, blockIdx.x, group, QUERIES, 0, below);
    if (tile.seq < 0) return;
    const Pool pool = {layer, pages, kv_heads, tokens, dim};
    const int *own_pages = section(step, AT_PAGES) + tile.seq * step[PAGE_WIDTH];
    const int start = section(step, AT_STARTS)[tile.seq];
    const int row0 = section(step, AT_OFFSETS)[tile.seq];
    // Keys that the last query sees; the first key of the block.
    const int seen = start + (tile.first + tile.count - 1) / group + 1;
    const int begin = split ? blockIdx.z * PIECE : 0;
    if (begin >= seen) return;
    const int end = split && begin + PIECE < seen ? begin + PIECE : seen;

    const float scale = 1.0f / sqrtf((float)dim);
    for (int i = warp; i < QUERIES; i += 4) {
        int n = tile.first + i;
        const float *from =
            q + (i64)(row0 + n / group) * ld + offset + (kv_head * group + n % group) * stride;
        for (int d = lane; d < dim; d += 32)
            queries[i * dim + d] = i < tile.count ? from[d] * scale : 0;
    }
    Running all[OWN], piece[OWN]; // query warp + 4 * i
#pragma unroll
    for (int i = 0; i < OWN; i++) clear(all[i]), clear(piece[i]);

    for (int key = begin; key < end; key += CHUNK) {
        __syncthreads(); // the rows of the last chunk are no longer needed
        load_rows(keys, pool, own_pages, kv_head, key, end, rows, dim + 1);
        __syncthreads();
        float factor[OWN];
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int n = warp + 4 * i;
            if (n >= tile.count) break; // the same for a whole warp
            const float *a = queries + n * dim, *b = rows + lane * (dim + 1);
            float score = 0;
            for (int d = 0; d < dim; d++) score = fmaf(a[d], b[d], score);
            // A row sees the keys up to its own.
            if (key + lane > start + (tile.first + n) / group) score = NEVER;
            float high = fmaxf(piece[i].top, warp_max(score));
            factor[i] = expf(piece[i].top - high);
            float weight = score == NEVER ? 0 : expf(score - high);
            piece[i].top = high;
            piece[i].total = fmaf(piece[i].total, factor[i], warp_sum(weight));
            weights[n * CHUNK + lane] = weight;
        }
        __syncthreads();
        load_rows(values, pool, own_pages, kv_head, key, end, rows, dim + 1);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int n = warp + 4 * i;
            if (n >= tile.count) break;
#pragma unroll
            for (int j = 0; j < LANES_OF_DIM; j++) piece[i].sum[j] *= factor[i];
            for (int k = 0; k < CHUNK; k++) {
                float weight = weights[n * CHUNK + k];
#pragma unroll
                for (int j = 0; j < LANES_OF_DIM; j++) {
                    int d = lane + 32 * j;
                    if (d < dim)
                        piece[i].sum[j] = fmaf(weight, rows[k * (dim + 1) + d], piece[i].sum[j]);
                }
            }
        }
        if (!split && ((key + CHUNK) % PIECE == 0 || key + CHUNK >= end)) {
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                join(all[i], piece[i].top, piece[i].total, piece[i].sum);
                clear(piece[i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int n = warp + 4 * i;
        if (n >= tile.count) break;
        int row = row0 + (tile.first + n) / group;
        int head = kv_head * group + (tile.first + n) % group;
        if (!split) {
            finish(all[i], out + ((i64)row * heads + head) * dim, dim);
            continue;
        }
        float *to = parts + (((i64)row * heads + head) * gridDim.z + blockIdx.z) * (dim + 2);
#pragma unroll
        for (int j = 0; j < LANES_OF_DIM; j++) {
            int d = lane + 32 * j;
            if (d < dim) to[d] = piece[i].sum[j];
        }
        if (lane == 0) to[dim] = piece[i].top, to[dim + 1] = piece[i].total;
    }
}

// Joins the pieces that a row sees.   out: [T, heads * dim]   grid: heads / 4, T
extern "C" __global__ void __launch_bounds__(128)
    attention_merge(const float *parts, float *out, const int *step, int heads, int dim,
                    int pieces) {
    int t = blockIdx.y, head = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (t >= step[N_ROWS] || head >= heads) return;
    int seq = section(step, AT_SEQ)[t];
    int seen = section(step, AT_STARTS)[seq] + t - section(step, AT_OFFSETS)[seq] + 1;
    Running all;
    clear(all);
    for (int p = 0; p * PIECE < seen; p++) {
        const float *from = parts + (((i64)t * heads + head) * pieces + p) * (dim + 2);
        float sum[LANES_OF_DIM];
#pragma unroll
        for (int j = 0; j < LANES_OF_DIM; j++) {
            int d = lane + 32 * j;
            sum[j] = d < dim ? from[d] : 0;
        }
        join(all, from[dim], from[dim + 1], sum);
    }
    finish(all, out + ((i64)t * heads + head) * dim, dim);
}
