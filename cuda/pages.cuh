// Pools of keys and values: [layer][page][kv head][token of the page][dim], float16, or float32
// where QRT_KV_F32 is defined.
#ifndef QRT_PAGES_CUH
#define QRT_PAGES_CUH
#include "common.cuh"

#ifdef QRT_KV_F32
typedef float kept;
INLINE float loaded(kept x) { return x; }
INLINE kept stored(float x) { return fminf(fmaxf(x, -3.402823466e38f), 3.402823466e38f); }
#else
typedef u16 kept;
INLINE float loaded(kept x) { return half_to_float(x); }
// Out of range means the largest number: an infinity would poison rows that must not see it.
INLINE kept stored(float x) { return float_to_half(fminf(fmaxf(x, -65504.0f), 65504.0f)); }
#endif

struct Pool {
    int layer, pages, kv_heads, tokens, dim;
};

// Where the numbers of a token of a page begin.
INLINE i64 place(const Pool &p, int page, int head, int token) {
    return ((((i64)p.layer * p.pages + page) * p.kv_heads + head) * p.tokens + token) * p.dim;
}
#endif
