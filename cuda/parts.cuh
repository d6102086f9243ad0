// Matrices of one format and one input that share a launch: up to four, those behind have 0 rows.
#ifndef QRT_PARTS_CUH
#define QRT_PARTS_CUH
#include "common.cuh"

// scale: of the product, residual: added to it; both may be NULL
struct Part {
    const u8 *w;
    const float *scale, *residual;
    float *out;
    int rows;
};

#define PART(N)                                                                                    \
    const u8 *w##N, const float *scale##N, const float *residual##N, float *out##N, int rows##N
#define PARTS PART(0), PART(1), PART(2), PART(3)
#define PART_GIVEN(N) w##N, scale##N, residual##N, out##N, rows##N
#define PARTS_GIVEN PART_GIVEN(0), PART_GIVEN(1), PART_GIVEN(2), PART_GIVEN(3)

// The part of a block, whose number becomes that within the part; size: rows of a block.
INLINE Part part_of(int &block, int size, PARTS) {
    Part part = {PART_GIVEN(0)}, part1 = {PART_GIVEN(1)}, part2 = {PART_GIVEN(2)};
    Part part3 = {PART_GIVEN(3)};
    int blocks = (rows0 + size - 1) / size;
    if (block < blocks) return part;
    block -= blocks, blocks = (rows1 + size - 1) / size;
    if (block < blocks) return part1;
    block -= blocks, blocks = (rows2 + size - 1) / size;
    if (block < blocks) return part2;
    block -= blocks;
    return part3;
}

INLINE void store(const Part &part, int t, int row, float sum) {
    i64 at = (i64)t * part.rows + row;
    float y = part.scale ? __fmul_rn(sum, part.scale[0]) : sum;
    part.out[at] = part.residual ? part.residual[at] + y : y;
}
#endif
