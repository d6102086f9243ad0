// Products of many rows of x on tensor cores: a block has TILE weight rows and TILE rows of x, with
// 2 * TILE threads. A warp has TILE / 2 weight rows (fragments of 16) and 32 rows of x (four of 8).
// Shared tiles are double: while one is multiplied, the next columns are loaded into the other.
// Each sum is added up in the same order whatever TILE is and whatever else is in a tile.
#ifndef QRT_TILES_CUH
#define QRT_TILES_CUH
#include "mma.cuh"
#include "unpack.cuh"

// The weight rows of a block: from `row` on, those of a matrix of `rows`.
struct Matrix {
    const u8 *w;
    int row, rows, row_bytes;
};

// The rows of x of a block: `count` places from `first` on of a list (NULL: of all numbers from 0);
// a row of x serves `sharing` places.
struct Places {
    const int *list;
    int first, count, sharing;
};

INLINE int place_of(const Places &p, int i) { return p.list ? p.list[p.first + i] : p.first + i; }

// The row of x for row i of a tile. There is none for rows from `count` on: what shared memory has
// there goes to sums of their own, which nobody stores.
INLINE int x_row(const Places &p, int i) {
    return p.sharing == 1 ? place_of(p, i) : place_of(p, i) / p.sharing;
}

// A weight row of a tile; rows beyond the last repeat it.
INLINE const u8 *weight_row(const Matrix &m, int i) {
    int row = m.row + i < m.rows ? m.row + i : m.rows - 1;
    return m.w + (i64)row * m.row_bytes;
}

template <int TILE> using Sums = float[TILE / 32][4][4];

// What a lane has of a tile: its first weight row and its warp's first row of x.
template <int TILE> INLINE int lane_row() {
    return threadIdx.x / 32 % 2 * (TILE / 2) + threadIdx.x % 32 / 4;
}
INLINE int warp_x() { return threadIdx.x / 64 * 32; }

#ifdef QRT_FLOAT
#    include "tiles_float.cuh"
#else
#    include "tiles_int8.cuh"
#endif

// The sums of a tile. x: [rows][cols / 32] int8 blocks, or [rows][cols] float32
template <int TILE>
INLINE void tile_sums(const Matrix &m, const Places &p, const tile_input *x, int cols,
                      Sums<TILE> &sum) {
    QRT_DYN_SMEM(Tiles<TILE>, tiles);
#pragma unroll
    for (int i = 0; i < TILE / 2; i++) sum[i / 16][i / 4 % 4][i % 4] = 0;
    fetch<TILE>(*tiles, m, p, x, 0, cols);
    await_copies();
    __syncthreads();
    for (int first = 0; first < cols; first += Tiles<TILE>::COLUMNS) {
        const int next = first + Tiles<TILE>::COLUMNS;
        if (next < cols) fetch<TILE>(*tiles, m, p, x, next, cols);
        multiply<TILE>(*tiles, first, cols, p.count, sum);
        await_copies();
        __syncthreads(); // the next tiles are there, these are no longer needed
    }
}

// Gives store(place, weight row, sum) what the lane has of a tile.
template <int TILE, class Store>
INLINE void store_sums(const Matrix &m, const Places &p, const Sums<TILE> &sum, Store store) {
    const int row0 = m.row + lane_row<TILE>(), x0 = warp_x() + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int right = 0; right < 2; right++) {
            const int i = x0 + 8 * j + right;
            if (i >= p.count) continue;
            const int place = place_of(p, i);
#pragma unroll
            for (int f = 0; f < TILE / 32 * 2; f++) {
                const int row = row0 + 8 * f;
                if (row < m.rows) store(place, row, sum[f / 2][j][f % 2 * 2 + right]);
            }
        }
    }
}
#endif
