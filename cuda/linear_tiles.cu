// linear of quantised weights for many rows of x: tiles of 64 x 64 on tensor cores. Four units of
// 32 columns at a time are unpacked to shared memory; each product of 32 (or 16) columns is exact
// in int32 and joins a float32 sum, unit by unit.
#include "mma.cuh"
#include "parts.cuh"
#include "unpack.cuh"

#define TILE_ROWS 64 // weight rows of a block
#define TILE_X 64    // rows of x
#define UNITS 4      // at once

// 12 words, as Quants: rows of fragments lie in different banks.
struct Tiles {
    Unit w[UNITS][TILE_ROWS];
    Quants x[UNITS][TILE_X];
};

INLINE void load_tiles(Tiles &tiles, const u8 *w, const Quants *x, int row, int rows, int t, int n,
                       int first, int units, int row_bytes) {
    for (int i = threadIdx.x; i < UNITS * TILE_ROWS; i += blockDim.x) {
        // Lanes take the units of a row, which lie side by side.
        int unit = i % UNITS, r = i / UNITS;
        int from = row + r < rows ? row + r : rows - 1;
        Unit &to = tiles.w[unit][r];
        if (first + unit < units) {
            unpack_unit(w + (i64)from * row_bytes, first + unit, to);
        } else {
            for (int j = 0; j < 8; j++) to.q[j] = 0;
            one_scale(to, 0, 0);
        }
    }
    for (int i = threadIdx.x; i < UNITS * TILE_X; i += blockDim.x) {
        int unit = i % UNITS, r = i / UNITS;
        int from = t + r < n ? t + r : n - 1, at = first + unit < units ? first + unit : units - 1;
        tiles.x[unit][r] = x[(i64)from * units + at];
    }
}

// w: [rows][row bytes] of each part   x: [T][cols / 32]   out: [T][rows]
// grid: the parts' blocks of 64 weight rows, T / 64   shared: Tiles
// A warp has 32 weight rows (two fragments) and 32 rows of x (four).
extern "C" __global__ void __launch_bounds__(128)
    linear_tiles(PARTS, const Quants *x, const int *step, int count, int cols, int row_bytes) {
    QRT_DYN_SMEM(Tiles, tiles);
    int block = blockIdx.x;
    const Part part = part_of(block, TILE_ROWS, PARTS_GIVEN);
    const int n = step[count], row = block * TILE_ROWS, t = blockIdx.y * TILE_X;
    if (t >= n) return;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, k = threadIdx.x % 4;
    const int row0 = warp % 2 * 32 + g, x0 = warp / 2 * 32; // within the tile
    float sum[2][4][4];
#pragma unroll
    for (int i = 0; i < 32; i++) sum[i / 16][i / 4 % 4][i % 4] = 0;

    for (int first = 0; first < cols / 32; first += UNITS) {
        __syncthreads(); // the tiles before are no longer needed
        load_tiles(*tiles, part.w, x, row, part.rows, t, n, first, cols / 32, row_bytes);
        __syncthreads();
        for (int unit = 0; unit < UNITS && first + unit < cols / 32; unit++) {
            int a[2][4];
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    a[m][i] = tiles->w[unit][row0 + 16 * m + 8 * (i % 2)].q[k + 4 * (i / 2)];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const Quants &own = tiles->x[unit][x0 + 8 * j + g];
                const Quants &left = tiles->x[unit][x0 + 8 * j + 2 * k], &right = *(&left + 1);
                int b[2] = {own.q[k], own.q[k + 4]};
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    int c[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
                    if (GROUP == 32) {
                        mma_32(c[0], a[m], b);
                    } else {
                        mma_16(c[0], a[m], b);
                        mma_16(c[1], a[m] + 2, b + 1);
                    }
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const Unit &u = tiles->w[unit][row0 + 16 * m + 8 * (i / 2)];
                        const Quants &v = i % 2 ? right : left;
                        float &to = sum[m][j][i];
                        to = fmaf(v.d * u.s[0], (float)c[0][i], to);
                        if (GROUP == 16) to = fmaf(v.d * u.s[1], (float)c[1][i], to);
                        if (MINIMA && GROUP == 32) to = fmaf(-u.m[0], v.s[0] + v.s[1], to);
                        if (MINIMA && GROUP == 16) {
                            to = fmaf(-u.m[0], v.s[0], to);
                            to = fmaf(-u.m[1], v.s[1], to);
                        }
                    }
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
        int m = i / 16, j = i / 4 % 4, e = i % 4;
        int r = row + row0 + 16 * m + 8 * (e / 2), at = t + x0 + 8 * j + 2 * k + e % 2;
        if (r < part.rows && at < n) store(part, at, r, sum[m][j][e]);
    }
}
