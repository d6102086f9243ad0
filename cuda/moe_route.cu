// moe_route: the experts of a row, from the largest score down, and their weights.
#include "common.cuh"

// (score, expert) comes before (other, than) in the list: ties go to the lower number.
INLINE bool before(float score, int expert, float other, int than) {
    return score > other || (score == other && expert < than);
}

// scores: [T][experts] view   out: [T][2 * used], numbers, then softmax over the chosen scores
// grid: T, a warp each
extern "C" __global__ void __launch_bounds__(32)
    moe_route(const float *scores, int ld, int offset, int experts, int used, float *out,
              const int *step, int count) {
    int t = blockIdx.x, lane = threadIdx.x;
    if (t >= step[count]) return;
    const float *own = scores + (i64)t * ld + offset;
    float *numbers = out + (i64)t * 2 * used, *weights = numbers + used;
    float last = float_of_bits(0x7f800000u), top = 0, sum = 0;
    int last_expert = -1;
    for (int i = 0; i < used; i++) {
        float best = float_of_bits(0xff800000u);
        int expert = experts; // none yet
        for (int e = lane; e < experts; e += 32)
            if (before(last, last_expert, own[e], e) && before(own[e], e, best, expert))
                best = own[e], expert = e;
        for (int m = 16; m; m >>= 1) {
            float other = __shfl_xor_sync(ALL_LANES, best, m);
            int than = __shfl_xor_sync(ALL_LANES, expert, m);
            if (before(other, than, best, expert)) best = other, expert = than;
        }
        if (expert ==
            experts) { // scores that are not numbers: any expert, and a weight that shows it
            expert = 0, best = float_of_bits(0x7fc00000u);
        }
        last = best, last_expert = expert;
        if (i == 0) top = best;
        float weight = expf(best - top);
        sum += weight;
        if (lane == 0) numbers[i] = (float)expert, weights[i] = weight;
    }
    if (lane == 0)
        for (int i = 0; i < used; i++) weights[i] /= sum;
}
