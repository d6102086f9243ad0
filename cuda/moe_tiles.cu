// moe_linear for many rows: each expert's weights meet the rows that name it in tiles on tensor
// cores, for all weights but F32.
#include "experts.cuh"
#include "tiles.cuh"

#define TILE GROUP_PLACES

// x: [T * used / sharing][cols / 32] or [..][cols]   places, groups: see moe_lists
// out: [T * used][rows]   scale: NULL, or one for all experts or for each
// grid: rows / TILE, T * used / TILE + experts   block: 2 * TILE   shared: Tiles
extern "C" __global__ void __launch_bounds__(128, 4)
    moe_tiles(const u8 *w, const float *scale, const tile_input *x, const int *places,
              const Group *groups, float *out, const int *step, int count, int experts, int scales,
              int used, int sharing, int rows, int cols, int row_bytes) {
    const int n = step[count] * used, number = blockIdx.y;
    if (number >= n / GROUP_PLACES + experts) return;
    const Group group = groups[number];
    if (group.count == 0) return;
    const u8 *own = w + (i64)group.expert * rows * row_bytes;
    const Matrix m = {own, (int)blockIdx.x * TILE, rows, row_bytes};
    const Places p = {places, group.first, group.count, sharing};
    Sums<TILE> sum;
    tile_sums<TILE>(m, p, x, cols, sum);
    const float by = scale ? scale[scales > 1 ? group.expert : 0] : 1;
    store_sums<TILE>(m, p, sum,
                     [&](int place, int row, float y) { out[(i64)place * rows + row] = y * by; });
}
