// linear for many rows of x: tiles on tensor cores, for all weights but F32.
#include "parts.cuh"
#include "tiles.cuh"

// w: [rows][row bytes] of each part   x: [T][cols / 32] or [T][cols]   out: [T][rows]
// grid: the parts' blocks of TILE weight rows, T / TILE   block: 2 * TILE   shared: Tiles
template <int TILE>
INLINE void linear_tiles(Part part, int block, const tile_input *x, const int *step, int count,
                         int cols, int row_bytes) {
    const int n = step[count], t = blockIdx.y * TILE;
    if (t >= n) return;
    const Matrix m = {part.w, block * TILE, part.rows, row_bytes};
    const Places p = {0, t, n - t < TILE ? n - t : TILE, 1};
    Sums<TILE> sum;
    tile_sums<TILE>(m, p, x, cols, sum);
    store_sums<TILE>(m, p, sum, [&](int at, int row, float y) { store(part, at, row, y); });
}

#define LINEAR_TILES(TILE)                                                                         \
    extern "C" __global__ void __launch_bounds__(256, 2) linear_tiles_##TILE(                      \
        PARTS, const tile_input *x, const int *step, int count, int cols, int row_bytes) {         \
        int block = blockIdx.x;                                                                    \
        Part part = part_of(block, TILE, PARTS_GIVEN);                                             \
        linear_tiles<TILE>(part, block, x, step, count, cols, row_bytes);                          \
    }
LINEAR_TILES(64)
LINEAR_TILES(128)
