// Routes: [T][2 * used], numbers of experts as float32, then their weights.
#ifndef QRT_EXPERTS_CUH
#define QRT_EXPERTS_CUH
#include "common.cuh"

// Places of one expert that share a tile: numbers of the list of places.
struct Group {
    int expert, first, count;
};
#define GROUP_PLACES 64

// The expert in place i of a route; what is no number of an expert (a NaN) stays in range.
INLINE int expert_of(const float *route, int i, int experts) {
    int e = (int)route[i];
    return e < 0 ? 0 : e < experts ? e : experts - 1;
}
#endif
