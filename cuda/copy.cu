// copy_items: one item of a pool over another of the same pool, for two pools at once: the keys and
// values of a page in all layers, or both parts of the state of a slot.
#include "common.cuh"

template <class Word>
INLINE void copy_words(const u8 *__restrict__ from, u8 *__restrict__ to, int bytes) {
    const Word *x = (const Word *)from;
    Word *y = (Word *)to;
    const int words = bytes / (int)sizeof(Word);
#pragma unroll 4
    for (int i = blockIdx.x * 256 + threadIdx.x; i < words; i += gridDim.x * 256) y[i] = x[i];
}

// Each pool: [outer][items][bytes of an item, even], aligned to 16; source is not target
// grid: any number of blocks, outer, 2
extern "C" __global__ void __launch_bounds__(256)
    copy_items(u8 *first, u8 *second, int first_bytes, int second_bytes, int items, int source,
               int target) {
    u8 *pool = blockIdx.z ? second : first;
    const int bytes = blockIdx.z ? second_bytes : first_bytes;
    const i64 outer = (i64)blockIdx.y * items;
    const u8 *from = pool + (outer + source) * bytes;
    u8 *to = pool + (outer + target) * bytes;
    if (bytes % 16 == 0) copy_words<Words>(from, to, bytes);
    else copy_words<u16>(from, to, bytes);
}
