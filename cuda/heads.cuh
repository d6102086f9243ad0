// Two views whose heads share a launch; the second has 0 heads where there is one.
#ifndef QRT_HEADS_CUH
#define QRT_HEADS_CUH
#include "common.cuh"

// Element (t, h, d) of x is at t * ld + offset + h * stride + d; out: [T, heads * dim].
struct Heads {
    const float *x;
    int ld, offset, stride, heads;
    float *out;
};

#define HEADS(N)                                                                                   \
    const float *x##N, int ld##N, int offset##N, int stride##N, int heads##N, float *out##N
#define HEADS_GIVEN(N) {x##N, ld##N, offset##N, stride##N, heads##N, out##N}

INLINE const float *head_of(const Heads &v, int t, int h) {
    return v.x + (i64)t * v.ld + v.offset + h * v.stride;
}
INLINE float *out_of(const Heads &v, int t, int h, int dim) {
    return v.out + ((i64)t * v.heads + h) * dim;
}
#endif
