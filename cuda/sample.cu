// argmax and top_k of rows of logits: the largest values and their columns, ties to the lower one.
// Two rounds: blocks take the best of their part of a row, then one block takes the best of those.
// A NaN comes before every number, so that it is not overlooked.
#include "common.cuh"

#define PART 2048 // columns of a block of 256
#define NONE 0x7fffffff

INLINE bool before(float a, int i, float b, int j) {
    bool nan_a = a != a, nan_b = b != b;
    if (nan_a || nan_b) return nan_a && (!nan_b || i < j);
    return a > b || (a == b && i < j);
}

// The first of all threads' pairs, in all threads; room: shared, 8 pairs.
INLINE void block_first(float &best, int &at, float *room) {
    int *places = (int *)(room + 8);
    for (int m = 16; m; m >>= 1) {
        float other = __shfl_xor_sync(ALL_LANES, best, m);
        int place = __shfl_xor_sync(ALL_LANES, at, m);
        if (before(other, place, best, at)) best = other, at = place;
    }
    __syncthreads(); // the pairs of the last call have been read
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = best, places[threadIdx.x / 32] = at;
    __syncthreads();
    best = room[0], at = places[0];
    for (int w = 1; w < 8; w++)
        if (before(room[w], places[w], best, at)) best = room[w], at = places[w];
}

// values: [n] shared or global, columns: NULL (i itself, + first) or [n] -> the best k, in order
INLINE void take(const float *values, const int *columns, int first, int n, int k, float *out,
                 int *out_columns, float *room) {
    float last = 0;
    int last_at = -1;
    for (int i = 0; i < k; i++) {
        float best = float_of_bits(0xff800000u);
        int at = NONE;
        for (int c = threadIdx.x; c < n; c += 256) {
            float value = values[c];
            int column = columns ? columns[c] : first + c;
            if (column == NONE || (last_at >= 0 && !before(last, last_at, value, column))) continue;
            if (before(value, column, best, at)) best = value, at = column;
        }
        block_first(best, at, room);
        last = best, last_at = at;
        if (threadIdx.x == 0) out[i] = best, out_columns[i] = at;
        if (at == NONE) last = float_of_bits(0xff800000u);
    }
}

// logits: [outs][n]   part_values, part_columns: [outs][parts][k], short parts end with NONE
// grid: parts, outs   shared: 16 words
extern "C" __global__ void __launch_bounds__(256)
    top_k_parts(const float *logits, float *part_values, int *part_columns, const int *step, int n,
                int k) {
    QRT_DYN_SMEM(float, room);
    int row = blockIdx.y, first = blockIdx.x * PART;
    if (row >= step[N_OUTS]) return;
    i64 to = ((i64)row * gridDim.x + blockIdx.x) * k;
    take(logits + (i64)row * n + first, (const int *)0, first, n - first < PART ? n - first : PART,
         k, part_values + to, part_columns + to, room);
}

// part_values, part_columns: [outs][n]   values, columns: [outs][k]   grid: outs
extern "C" __global__ void __launch_bounds__(256)
    top_k(const float *part_values, const int *part_columns, float *values, int *columns,
          const int *step, int n, int k) {
    QRT_DYN_SMEM(float, room);
    int row = blockIdx.x;
    if (row >= step[N_OUTS]) return;
    take(part_values + (i64)row * n, part_columns + (i64)row * n, 0, n, k, values + (i64)row * k,
         columns + (i64)row * k, room);
}
