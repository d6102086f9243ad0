// Tiles of quantised weights and int8 blocks of x; see tiles.cuh. Each product of 32 (or 16)
// columns is exact in int32 and joins a float32 sum, unit by unit.
#ifndef QRT_TILES_INT8_CUH
#define QRT_TILES_INT8_CUH

typedef Quants tile_input;

struct __align__(16) Row : Unit {}; // to be written 16 bytes at a time

// Rows of 12 words: those of fragments lie in different banks. Units are apart by what puts those
// of two (128: four) rows in different banks when they are written.
template <int TILE> struct Tiles {
    static const int UNITS = 256 / TILE, COLUMNS = 32 * UNITS; // at once
    template <class T> struct Column {
        T row[TILE];
        u32 apart[TILE / 8];
    };
    Column<Row> w[2][UNITS];
    Column<Quants> x[2][UNITS];
};

INLINE int half_of_tiles(int first, int columns) { return first / columns % 2; }

// Weights are unpacked on their way: a lane takes a unit, neighbours those of a row that lie side
// by side. Units beyond the last column are left as they are: nobody multiplies them.
template <int TILE>
INLINE void fetch(Tiles<TILE> &tiles, const Matrix &m, const Places &p, const Quants *x, int first,
                  int cols) {
    const int UNITS = Tiles<TILE>::UNITS, threads = 2 * TILE, units = cols / 32;
    const int half = half_of_tiles(first, Tiles<TILE>::COLUMNS), unit0 = first / 32;
    for (int i = threadIdx.x; i < 3 * UNITS * TILE; i += threads) {
        const int r = i / (3 * UNITS), unit = i / 3 % UNITS, part = i % 3; // of 16 bytes
        if (r >= p.count || unit0 + unit >= units) continue;
        const Quants *from = x + (i64)x_row(p, r) * units + unit0 + unit;
        copy_ahead((Words *)&tiles.x[half][unit].row[r] + part, (const Words *)from + part);
    }
    for (int i = threadIdx.x; i < UNITS * TILE; i += threads) {
        const int unit = i % UNITS, r = i / UNITS;
        if (unit0 + unit >= units) continue;
        Row u;
        unpack_unit(weight_row(m, r), unit0 + unit, u);
        tiles.w[half][unit].row[r] = u;
    }
}

template <int TILE>
INLINE void multiply(const Tiles<TILE> &tiles, int first, int cols, int count, Sums<TILE> &sum) {
    const int half = half_of_tiles(first, Tiles<TILE>::COLUMNS);
    const int g = threadIdx.x % 32 / 4, k = threadIdx.x % 4;
    const int row0 = lane_row<TILE>(), x0 = warp_x();
#pragma unroll 1
    for (int unit = 0; unit < Tiles<TILE>::UNITS && first + 32 * unit < cols; unit++) {
        const Unit *w = tiles.w[half][unit].row + row0;
        int b[4][2];
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                b[j][i] = tiles.x[half][unit].row[x0 + 8 * j + g].q[k + 4 * i];
#pragma unroll
        for (int m = 0; m < TILE / 32; m++) {
            int a[4];
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = w[16 * m + 8 * (i % 2)].q[k + 4 * (i / 2)];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (x0 + 8 * j >= count) continue; // the same for all lanes of a warp
                const Quants *x = tiles.x[half][unit].row + x0 + 8 * j;
                const Quants &left = x[2 * k], &right = x[2 * k + 1];
                int c[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
                if (GROUP == 32) {
                    mma_32(c[0], a, b[j]);
                } else {
                    mma_16(c[0], a, b[j]);
                    mma_16(c[1], a + 2, b[j] + 1);
                }
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const Unit &u = w[16 * m + 8 * (i / 2)];
                    const Quants &v = i % 2 ? right : left;
                    float &to = sum[m][j][i];
                    to = fmaf(v.d * u.s[0], (float)c[0][i], to);
                    if (GROUP == 16) to = fmaf(v.d * u.s[1], (float)c[1][i], to);
                }
            }
        }
        if (MINIMA) __syncwarp(); // so that their scales are not loaded before: fewer registers
#pragma unroll
        for (int j = 0; MINIMA && j < 4; j++) {
            if (x0 + 8 * j >= count) continue;
            const Quants &left = tiles.x[half][unit].row[x0 + 8 * j + 2 * k], &right = *(&left + 1);
#pragma unroll
            for (int i = 0; i < TILE / 8; i++) {
                const Unit &u = w[8 * (i / 2)];
                const Quants &v = i % 2 ? right : left;
                float &to = sum[i / 4][j][i % 4];
                if (GROUP == 32) {
                    to = fmaf(-u.m[0], v.s[0] + v.s[1], to);
                } else {
                    to = fmaf(-u.m[0], v.s[0], to);
                    to = fmaf(-u.m[1], v.s[1], to);
                }
            }
        }
    }
}
#endif
