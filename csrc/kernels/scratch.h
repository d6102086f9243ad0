// Bytes of scratch that ops need, for whoever allocates it. Knows shapes, no instruction level.
#ifndef QRT_SCRATCH_H
#define QRT_SCRATCH_H
#include <stddef.h>
#include <stdint.h>

// No vector is longer than this many floats.
#define QRT_MAX_LANES 16
static inline int64_t qrt_padded(int64_t n) {
    return (n + QRT_MAX_LANES - 1) / QRT_MAX_LANES * QRT_MAX_LANES;
}

// x rows that a product works on at a time: what they hold (`bytes` for each column) stays in the
// second-level cache while all weights pass by. A multiple of the tiles.
#define QRT_X_BYTES (320 * 1024)
#define QRT_X_ROWS 252
static inline int64_t qrt_x_rows(int64_t cols, int64_t bytes) {
    const int64_t rows = QRT_X_BYTES / (cols * bytes) / 12 * 12;
    return rows < 24 ? 24 : rows > QRT_X_ROWS ? QRT_X_ROWS : rows;
}

// linear, moe_linear: row numbers; then, for a call of at most QRT_X_ROWS rows, either for each a
// number for every 16 columns and 32 sums of a panel, or for each a pointer, QRT_FLOAT_ROWS vectors
// of partial sums and as many results, QRT_WIDE widened columns of that many weight rows, and the x
// rows in bfloat16.
#define QRT_FLOAT_ROWS 8
#define QRT_WIDE 512
static inline int64_t qrt_bf16_row(int64_t cols) { return (cols + 31) / 32 * 32; } // its length
static inline size_t qrt_linear_scratch(int64_t numbers, int64_t rows, int64_t cols) {
    const int64_t few = qrt_x_rows(cols, 4), n = rows < QRT_X_ROWS ? rows : QRT_X_ROWS;
    const int64_t floats = n * QRT_FLOAT_ROWS * (QRT_MAX_LANES + 1) + QRT_FLOAT_ROWS * QRT_WIDE;
    const int64_t rounded = (n < few ? n : few) * qrt_bf16_row(cols) * 2;
    const int64_t most = qrt_x_rows(cols, 1), starts = (n < most ? n : most) * (cols / 16) * 4;
    return (size_t)(numbers * 4 + 192 + rounded + starts) + QRT_X_ROWS * sizeof(float *) +
           (size_t)floats * sizeof(float);
}

// rope: frequencies (double), cosines and sines of a row.
static inline size_t qrt_rope_scratch(int rot) { return (size_t)qrt_padded(rot / 2) * 16; }

// conv1d_silu: taps, and the inputs before the step's first row, of a block of channels.
#define QRT_CONV_BLOCK 1024
static inline size_t qrt_conv_scratch(int kernel) {
    return (size_t)(2 * kernel - 1) * QRT_CONV_BLOCK * sizeof(float);
}

// delta_net: state rows that are worked on together, padded, for sizes d that vectors do not
// divide; k, q and v of the tokens that they are taken through, padded.
#define QRT_DELTA_ROWS 32
#define QRT_DELTA_TOKENS 64
static inline size_t qrt_delta_scratch(int d) {
    return (size_t)(QRT_DELTA_ROWS + 3 * QRT_DELTA_TOKENS) * (size_t)qrt_padded(d) * sizeof(float);
}

// attention: keys are taken in blocks of at most this many, queries (rows x heads of a group) in
// tiles.
#define QRT_KEYS 64
#define QRT_QUERIES 48
// Keys that are converted at once; columns of values that are.
#define QRT_KEY_CHUNK 16
static inline int qrt_attention_tile_rows(int group) {
    return group >= QRT_QUERIES ? 1 : QRT_QUERIES / group;
}
static inline size_t qrt_attention_scratch(int heads, int kv_heads, int dim) {
    size_t group = (size_t)(heads / kv_heads), d = (size_t)qrt_padded(dim);
    size_t queries = group * (size_t)qrt_attention_tile_rows((int)group);
    size_t floats =
        queries * (3 * d + QRT_KEYS + 4 * QRT_MAX_LANES); // q, sums, joined sums, scores, scalars
    floats += QRT_KEY_CHUNK * d + QRT_KEYS * 4 * QRT_MAX_LANES; // converted keys and values
    return floats * sizeof(float);
}

// The keys of a row are summed in pieces of this many pages, which are then joined in order: always
// the same pieces, so that a row's result does not depend on who works on them.
#define QRT_SPLIT_PAGES 8
// Steps of at most this many rows hand out the pieces to different threads (attention_merge joins
// them).
static inline int qrt_attention_split_rows(int threads, int kv_heads) {
    int rows = 4 * threads / kv_heads;
    return rows < 1 ? 1 : rows > 16 ? 16 : rows;
}
// Shared scratch: a piece's sums, maximum and total for each row and head. pages: most pages of a
// sequence.
static inline size_t qrt_attention_shared(int threads, int heads, int kv_heads, int dim,
                                          int64_t pages) {
    size_t pieces = (size_t)((pages + QRT_SPLIT_PAGES - 1) / QRT_SPLIT_PAGES);
    return (size_t)qrt_attention_split_rows(threads, kv_heads) * (size_t)heads * pieces *
           (size_t)(qrt_padded(dim) + QRT_MAX_LANES) * sizeof(float);
}
#endif
