// What moe_linear needs beside its products where places are grouped by expert: the groups, and the
// sum over a row's places. Place p is place p % used of row p / used.
#include "experts.cuh"

INLINE int expert_of_place(const float *route, int p, int used, int experts) {
    return expert_of(route + (i64)(p / used) * 2 * used, p % used, experts);
}

// places: [T * used] by expert, those of an expert rising   groups: [T * used / 64 + experts]
// Expert e, behind n places of others, has the groups from n / 64 + e on: always enough, some
// empty. So no expert needs to know the groups of another. grid: experts / 4, a warp each
extern "C" __global__ void __launch_bounds__(128)
    moe_lists(const float *route, int *places, Group *groups, const int *step, int count,
              int experts, int used) {
    const int e = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int n = step[count] * used;
    if (e >= experts) return;
    int begin = 0; // places of the experts before
#pragma unroll 4
    for (int p = lane; p < n; p += 32) begin += expert_of_place(route, p, used, experts) < e;
    for (int m = 16; m; m >>= 1) begin += __shfl_xor_sync(ALL_LANES, begin, m);
    int end = begin;
#pragma unroll 4
    for (int from = 0; from < n; from += 32) {
        const int p = from + lane;
        const bool own = p < n && expert_of_place(route, p, used, experts) == e;
        const u32 all = __ballot_sync(ALL_LANES, own);
        if (own) places[end + __popc(all & ((1u << lane) - 1))] = p;
        end += __popc(all);
    }
    const int first = begin / GROUP_PLACES + e, last = end / GROUP_PLACES + e;
    for (int i = first + lane; i <= last; i += 32) {
        const int at = begin + (i - first) * GROUP_PLACES, left = end - at;
        groups[i] = {e, at, left < 0 ? 0 : left < GROUP_PLACES ? left : GROUP_PLACES};
    }
}

// products: [T][used][rows]   out: [T][rows], weighted and summed in list order
// grid: rows / 128, T
extern "C" __global__ void __launch_bounds__(128)
    moe_sum(const float *products, const float *route, float *out, const int *step, int count,
            int used, int rows) {
    const int t = blockIdx.y, row = blockIdx.x * 128 + threadIdx.x;
    if (t >= step[count] || row >= rows) return;
    const float *weights = route + (i64)t * 2 * used + used;
    float total = 0;
    for (int i = 0; i < used; i++)
        total = fmaf(weights[i], products[((i64)t * used + i) * rows + row], total);
    out[(i64)t * rows + row] = total;
}
