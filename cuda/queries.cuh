// Which queries of attention a block has. A query is a row and one of its heads; those of a kv head
// lie row after row.
#ifndef QRT_QUERIES_CUH
#define QRT_QUERIES_CUH
#include "common.cuh"

struct Tile {
    int seq, first, count; // seq -1: none; first: query within the sequence
};

// Tile number `tile`, of `size` queries, of the sequences that have from .. below - 1 rows.
INLINE Tile tile_of(const int *step, int tile, int group, int size, int from, int below) {
    const int *offsets = section(step, AT_OFFSETS);
    Tile t = {-1, 0, 0};
    for (int s = 0; s < step[N_SEQS]; s++) {
        int rows = offsets[s + 1] - offsets[s], queries = rows * group;
        if (rows < from || rows >= below) continue;
        int tiles = (queries + size - 1) / size;
        if (tile < tiles) {
            t.seq = s, t.first = tile * size;
            t.count = queries - t.first < size ? queries - t.first : size;
            break;
        }
        tile -= tiles;
    }
    return t;
}
#endif
