// The k largest of each row of logits and their columns, ties to the lower one, in no order.
// Rounds: blocks keep the k first of their part of a row, until one block sees all that is left. A
// NaN comes before every number, so that it is not overlooked.
#include "common.cuh"

#define PART 8192 // keys of a block of 1024
#define EACH 8
#define WARPS 32
#define NONE 0xffffffffffffffffull // behind every key

// Rises where the logit falls, among equal ones with the column. -0 is 0.
INLINE u64 key_of(float logit, int column) {
    u32 u = __float_as_uint(logit);
    if (u == 0x80000000u) u = 0;
    u = u >> 31 ? u : u ^ 0x7fffffffu;
    if ((__float_as_uint(logit) & 0x7fffffffu) > 0x7f800000u) u = 0;
    return (u64)u << 32 | (u32)column;
}

// The bits of the logit.
INLINE u32 bits_of(u64 key) {
    u32 u = (u32)(key >> 32);
    return u >> 31 ? u : u ^ 0x7fffffffu;
}

// How many keys of all threads are at most bound. counts: shared, [WARPS]; not to be used by two
// calls in a row.
INLINE int count_to(const u64 (&keys)[EACH], u64 bound, int *counts) {
    int n = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) n += __popc(__ballot_sync(ALL_LANES, keys[i] <= bound));
    if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = n;
    __syncthreads();
    n = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) n += counts[w];
    return n;
}

// What is at least the k-th key of all threads and below the next; NONE where there are fewer.
// Found bit by bit from the highest. counts: shared, [2][WARPS]
INLINE u64 bound_of(const u64 (&keys)[EACH], int k, int *counts) {
    u64 low = 0; // at most the k-th key
    for (int bit = 63; bit >= 0; bit--) {
        const u64 high = low | ((1ull << bit) - 1);
        const int n = count_to(keys, high, counts + bit % 2 * WARPS);
        if (n == k) return high;
        if (n < k) low = high + 1;
    }
    return low;
}

// Hands the k first of all threads' keys to put(place, key), places from 0 on in the order of
// threads, and NONE to those that are left. counts: shared, [3][WARPS]
template <class Put> INLINE void keep(const u64 (&keys)[EACH], int k, int *counts, const Put &put) {
    const u64 bound = bound_of(keys, k, counts);
    const int warp = threadIdx.x / 32, below = (1u << threadIdx.x % 32) - 1;
    int place = 0, end = 0;
    bool kept[EACH];
    u32 lanes[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        kept[i] = keys[i] <= bound && keys[i] != NONE;
        lanes[i] = __ballot_sync(ALL_LANES, kept[i]);
        place += __popc(lanes[i]);
    }
    counts += 2 * WARPS;
    if (threadIdx.x % 32 == 0) counts[warp] = place;
    __syncthreads();
    place = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        if (w == warp) place = end;
        end += counts[w];
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (kept[i]) put(place + __popc(lanes[i] & below), keys[i]);
        place += __popc(lanes[i]);
    }
    for (int i = end + threadIdx.x; i < k; i += PART / EACH) put(i, NONE);
}

// n: keys of the row   This thread's of the part that is the block's, NONE behind the row's end
INLINE void load_part(const u64 *row, int n, u64 (&keys)[EACH]) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = blockIdx.x * PART + i * (PART / EACH) + threadIdx.x;
        keys[i] = at < n ? row[at] : NONE;
    }
}

// logits: [outs][n]   out: [outs][parts][k]   grid: parts, outs   shared: 3 * 32 words, as below
extern "C" __global__ void __launch_bounds__(1024)
    top_k_parts(const float *logits, u64 *out, const int *step, int n, int k) {
    QRT_DYN_SMEM(int, counts);
    const int row = blockIdx.y;
    if (row >= step[N_OUTS]) return;
    u64 keys[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int at = blockIdx.x * PART + i * (PART / EACH) + threadIdx.x;
        keys[i] = at < n ? key_of(logits[(i64)row * n + at], at) : NONE;
    }
    u64 *to = out + ((i64)row * gridDim.x + blockIdx.x) * k;
    keep(keys, k, counts, [&](int place, u64 key) { to[place] = key; });
}

// keys: [outs][n]   out: [outs][parts][k]   grid: parts, outs
extern "C" __global__ void __launch_bounds__(1024)
    top_k_join(const u64 *keys, u64 *out, const int *step, int n, int k) {
    QRT_DYN_SMEM(int, counts);
    const int row = blockIdx.y;
    if (row >= step[N_OUTS]) return;
    u64 own[EACH];
    load_part(keys + (i64)row * n, n, own);
    u64 *to = out + ((i64)row * gridDim.x + blockIdx.x) * k;
    keep(own, k, counts, [&](int place, u64 key) { to[place] = key; });
}

// keys: [outs][n], n at most PART, k of them at least not NONE
// out: [outs][2][k], the bits of logits, then columns   grid: 1, outs
extern "C" __global__ void __launch_bounds__(1024)
    top_k(const u64 *keys, u32 *out, const int *step, int n, int k) {
    QRT_DYN_SMEM(int, counts);
    const int row = blockIdx.y;
    if (row >= step[N_OUTS]) return;
    u64 own[EACH];
    load_part(keys + (i64)row * n, n, own);
    u32 *to = out + (i64)row * 2 * k;
    keep(own, k, counts,
         [&](int place, u64 key) { to[place] = bits_of(key), to[k + place] = (u32)key; });
}
