// kv_append: keys and values of a step's rows into pages.
#include "pages.cuh"

// k, v: [T, kv_heads, dim] views   grid: kv_heads * dim / 128, T
extern "C" __global__ void __launch_bounds__(128)
    kv_append(const float *k, int k_ld, int k_offset, int k_stride, const float *v, int v_ld,
              int v_offset, int v_stride, kept *keys, kept *values, const int *step, int layer,
              int pages, int kv_heads, int tokens, int dim) {
    int t = blockIdx.y, c = blockIdx.x * 128 + threadIdx.x;
    if (t >= step[N_ROWS] || c >= kv_heads * dim) return;
    int seq = section(step, AT_SEQ)[t], head = c / dim, d = c % dim;
    int at = section(step, AT_STARTS)[seq] + t - section(step, AT_OFFSETS)[seq];
    int page = section(step, AT_PAGES)[seq * step[PAGE_WIDTH] + at / tokens];
    Pool pool = {layer, pages, kv_heads, tokens, dim};
    i64 to = place(pool, page, head, at % tokens) + d;
    keys[to] = stored(k[(i64)t * k_ld + k_offset + head * k_stride + d]);
    values[to] = stored(v[(i64)t * v_ld + v_offset + head * v_stride + d]);
}
