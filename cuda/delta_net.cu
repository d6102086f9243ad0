// delta_net: the gated delta rule. With S the state before a row (values by keys), e = exp(g):
//     u = beta (v - e S k)    out = e S q + (k . q) u    S <- e S + u k
// so that S is read once. Eight lanes share a row of S; rows of S do not depend on each other.
// state: [slot][layers][heads][d values][d keys] float32
#include "common.cuh"

#define LANES 8
#define ROWS 32 // of S, in a block of 256

INLINE float lanes_sum(float v) {
    for (int lane = LANES / 2; lane; lane >>= 1) v += __shfl_xor_sync(ALL_LANES, v, lane);
    return v;
}

// q, k: [T, key heads, d]   v: [T, heads, d] views   gates: [T, 2 * heads], log decays, then betas
// out: [T, heads * d]   below: sequences of so many rows and more are left out (delta_chunks.cu)
// grid: d / ROWS, heads, seqs   COLUMNS: of a lane, at least d / LANES
template <int COLUMNS>
INLINE void delta_net(const float *q, int q_ld, int q_offset, int q_stride, const float *k,
                      int k_ld, int k_offset, int k_stride, int key_heads, const float *v, int v_ld,
                      int v_offset, int v_stride, const float *gates, float *state, float *out,
                      const int *step, int below, int layers, int layer, int d) {
    const int s = blockIdx.z, head = blockIdx.y, heads = gridDim.y;
    if (s >= step[N_SEQS]) return;
    const int lane = threadIdx.x % LANES, row = blockIdx.x * ROWS + threadIdx.x / LANES;
    const bool inside = row < d; // lanes beyond take part in the shuffles
    const i64 of_slot = (i64)layers * heads * d * d;
    const i64 at = (((i64)layer * heads + head) * d + (inside ? row : 0)) * d + lane;
    const int *offsets = section(step, AT_OFFSETS);
    const int first = offsets[s], last = offsets[s + 1];
    if (last - first >= below) return;

    float own[COLUMNS];
    const float *from = state + section(step, AT_SOURCES)[s] * of_slot + at;
    const bool fresh = section(step, AT_STARTS)[s] == 0;
#pragma unroll
    for (int j = 0; j < COLUMNS; j++)
        own[j] = !fresh && inside && lane + LANES * j < d ? from[LANES * j] : 0;

    int save = 0;
    const int *save_rows = section(step, AT_SAVES), saves = step[N_SAVES];
    while (save < saves && save_rows[save] < first) save++;

    const float *key = k + k_offset + head % key_heads * k_stride + lane;
    const float *query = q + q_offset + head % key_heads * q_stride + lane;
    for (int t = first; t < last; t++) {
        float a[COLUMNS], sk = 0, sq = 0, kq = 0;
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            bool there = lane + LANES * j < d;
            a[j] = there ? key[(i64)t * k_ld + LANES * j] : 0;
            float b = there ? query[(i64)t * q_ld + LANES * j] : 0;
            sk = fmaf(own[j], a[j], sk);
            sq = fmaf(own[j], b, sq);
            kq = fmaf(a[j], b, kq);
        }
        sk = lanes_sum(sk), sq = lanes_sum(sq), kq = lanes_sum(kq);
        float decay = expf(gates[(i64)t * 2 * heads + head]);
        float beta = gates[(i64)t * 2 * heads + heads + head];
        float value = inside ? v[(i64)t * v_ld + v_offset + head * v_stride + row] : 0;
        float u = beta * fmaf(-decay, sk, value);
        if (inside && lane == 0)
            out[((i64)t * heads + head) * d + row] = fmaf(u, kq, __fmul_rn(decay, sq));
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) own[j] = fmaf(u, a[j], __fmul_rn(own[j], decay));

        if (save < saves && save_rows[save] == t) {
            float *to = state + section(step, AT_SAVED)[save++] * of_slot + at;
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                if (inside && lane + LANES * j < d) to[LANES * j] = own[j];
        }
    }
    float *to = state + section(step, AT_SLOTS)[s] * of_slot + at;
#pragma unroll
    for (int j = 0; j < COLUMNS; j++)
        if (inside && lane + LANES * j < d) to[LANES * j] = own[j];
}

#define DELTA_NET(COLUMNS)                                                                         \
    extern "C" __global__ void __launch_bounds__(256) delta_net_##COLUMNS(                         \
        const float *q, int q_ld, int q_offset, int q_stride, const float *k, int k_ld,            \
        int k_offset, int k_stride, int key_heads, const float *v, int v_ld, int v_offset,         \
        int v_stride, const float *gates, float *state, float *out, const int *step, int below,    \
        int layers, int layer, int d) {                                                            \
        delta_net<COLUMNS>(q, q_ld, q_offset, q_stride, k, k_ld, k_offset, k_stride, key_heads, v, \
                           v_ld, v_offset, v_stride, gates, state, out, step, below, layers,       \
                           layer, d);                                                              \
    }
DELTA_NET(4)
DELTA_NET(8)
DELTA_NET(16)
DELTA_NET(32)
