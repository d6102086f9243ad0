// The C side's own vocabulary: tensors, views, ops, a step, and the calls that the binding makes.
#ifndef QRT_H
#define QRT_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "blocks.h"

enum {
    QRT_OK = 0,
    QRT_NO_MEMORY = 1,
    QRT_NO_ISA = 2,
    QRT_BAD_ARGUMENT = 3,
    QRT_THREAD_FAILED = 4,
    QRT_BAD_VALUE = 5, // a value to quantise is NaN or infinite
    QRT_BAD_SCALE = 6  // a block's scale does not fit its storage
};

typedef struct {
    const uint8_t *data; // in the mapped file: rows adjacent, experts expert_bytes apart
    int32_t format;      // QRT_F32 ..
    int32_t experts;     // 1 for a matrix
    int64_t rows, cols, row_bytes, expert_bytes;
    const float *scale; // NULL, or a factor of the product for each expert
} qrt_tensor;

// Element (row r, head h, d) is at ptr[r * ld + h * stride + d].
typedef struct {
    float *ptr;
    int64_t ld;
    int32_t heads, dim, stride;
} qrt_view;

// Rows quantised to int8 in blocks of 32: x[i] is about d[i / 32] * q[i].
// n32, n16: the sum of q over each 32 elements, each 16; s32, s16: d times those. Rows are
// contiguous: cols, cols / 32, ..
typedef struct {
    int8_t *q;
    float *d, *s32, *s16;
    int32_t *n32, *n16;
    int64_t cols;
} qrt_quant;

// One matrix of a linear op: out = x @ w.T (+ residual).
typedef struct {
    qrt_tensor w;
    qrt_view out;
    const float *residual; // NULL, or [rows, out.ld]
} qrt_part;

typedef enum {
    QRT_EMBED,
    QRT_RMS_NORM,
    QRT_LINEAR,
    QRT_ROPE,
    QRT_KV_APPEND,
    QRT_ATTENTION,
    QRT_ATTENTION_MERGE, // right after attention, same fields: joins what attention left in
                         // c->shared
    QRT_SIGMOID_MUL,
    QRT_CONV1D_SILU,
    QRT_DELTA_GATES,
    QRT_L2_NORM,
    QRT_DELTA_NET,
    QRT_GATED_RMS_NORM,
    QRT_SILU_MUL,
    QRT_ADD,
    QRT_MOE_ROUTE,
    QRT_MOE_LINEAR,
    QRT_GATHER_ROWS,
    QRT_QUANTIZE,
    QRT_MOE_SUM,
    QRT_N_OPS
} qrt_kind;

typedef struct {
    int32_t kind;
    int32_t layer;    // index among the layers with this kind of state
    int32_t gathered; // rows: wanted logit rows instead of token rows
    int32_t n[4];     // rope: rot, sections h and w; attention: kv_heads; moe: used, reduce
    float f[2];       // eps | scale | theta
    qrt_view out;
    qrt_view in[4];
    const float *vec[2];
    qrt_part *parts; // linear, moe_linear, embed
    int32_t n_parts;
    qrt_quant quant; // q == NULL: none. linear, moe_linear: the quantised input; others: out is
                     // also written here
} qrt_op;

typedef struct {
    int32_t n_rows, n_seqs, n_out, page_width, n_saves;
    const int32_t *tokens, *positions, *row_offsets, *starts, *slots, *pages, *out_rows;
    const int32_t *sources; // [n_seqs] slots from which states are read where starts > 0
    const int32_t *save_rows, *save_slots; // [n_saves] rows, rising: the state after each also goes
                                           // to its slot
} qrt_batch;

// The first save at row `row` or later: its number, n_saves if there is none.
static inline int32_t qrt_first_save(const qrt_batch *b, int64_t row) {
    int32_t i = 0;
    while (i < b->n_saves && b->save_rows[i] < row) i++;
    return i;
}

// State pools. KV: [layer][page][kv_head][page_tokens][head_dim], kv_bytes each: 2 (float16) or 4
// (float32).
typedef struct {
    void *k, *v;
    float *delta; // [slot][layer][v_heads][d value][d key]
    float *conv;  // [slot][layer][channels][kernel - 1]
    int32_t kv_bytes, n_pages, page_tokens, kv_heads, head_dim, attention_layers;
    int32_t delta_layers, v_heads, d, channels, conv_kernel;
} qrt_state;

typedef struct qrt_kernels qrt_kernels;
struct qrt_product;
#define QRT_FEW_X 3    // with at most so many x rows, reading the weights takes longest
#define QRT_DIRECT_X 4 // with at most so many, many formats do without a panel

// What an op sees while a thread works on it.
typedef struct {
    const qrt_kernels *kernels;
    const qrt_batch *batch;
    const qrt_state *state;
    int thread, threads;
    uint8_t *scratch; // this thread's own, 64-byte aligned
    size_t scratch_bytes;
    int64_t *next;   // shared counter for work handed out in pieces, 0 at the start of each op
    uint8_t *shared; // scratch shared by the threads of an op, 64-byte aligned
} qrt_ctx;

static inline int64_t qrt_rows(const qrt_op *op, const qrt_ctx *c) {
    return op->gathered ? c->batch->n_out : c->batch->n_rows;
}

// Next piece of an op's work, handed out first come first served; returns its number.
static inline int64_t qrt_take(const qrt_ctx *c) {
    return __atomic_fetch_add(c->next, 1, __ATOMIC_RELAXED);
}

// The static share [*lo, *hi) of n pieces that falls to this thread.
static inline void qrt_share(const qrt_ctx *c, int64_t n, int64_t *lo, int64_t *hi) {
    *lo = n * c->thread / c->threads;
    *hi = n * (c->thread + 1) / c->threads;
}

typedef void (*qrt_op_fn)(const qrt_op *, const qrt_ctx *);

// Everything that is built once per instruction level. A higher level sets only what it improves.
struct qrt_kernels {
    const char *isa;
    qrt_op_fn op[QRT_N_OPS];
    void (*dequantize[QRT_N_FORMATS])(const uint8_t *row, float *out, int64_t n);
    // One row of n values, a whole number of blocks, to `row`; importance: NULL, or n weights of
    // the squared error, finite and not negative. Returns a status. NULL: the format is only read.
    int (*quantize[QRT_N_FORMATS])(const float *x, const float *importance, uint8_t *row,
                                   int64_t n);
    // A few x rows (at most QRT_DIRECT_X) with weight rows row0 .. row0 + rows, straight from the
    // blocks. Returns how many of these rows are done: none for formats that it lacks. NULL: the
    // level and those below have none. See kernels/product.h for what it is given.
    int64_t (*direct)(const struct qrt_product *, int64_t row0, int64_t rows);
    double (*int8_peak)(void); // a loop of int8 products on registers; returns the operations (2
                               // per product) it did
};

// dispatch.c. name NULL: the best that processor and operating system support.
int qrt_isa_usable(const char *name);
const qrt_kernels *qrt_isa(const char *name);
extern const char *const qrt_isa_names[]; // ends with NULL; lowest first

// threadpool.c
typedef struct qrt_pool qrt_pool;
int qrt_pool_create(int threads, qrt_pool **out);
void qrt_pool_destroy(qrt_pool *);
int qrt_pool_threads(const qrt_pool *);
// Runs fn(arg, thread, threads) on every thread of the pool, the caller being thread 0; returns
// when all are done.
void qrt_pool_run(qrt_pool *, void (*fn)(void *, int, int), void *arg);
// Memory that lives as long as the pool and only grows; NULL if it cannot be had. 4096-byte
// aligned.
void *qrt_pool_scratch(qrt_pool *, size_t bytes);
// Meeting point of all threads inside qrt_pool_run.
void qrt_pool_barrier(qrt_pool *);

// run.c: one step. seconds: NULL, or [n_ops] to which the time of each op is added.
int qrt_run(const qrt_kernels *, qrt_pool *, const qrt_op *ops, int n_ops, const qrt_batch *,
            const qrt_state *, double *seconds);

// quantize.c: rows of `cols` values to rows of blocks, split over the pool. The first bad row's
// status, and nothing promised about `out` then. importance: NULL, or [cols].
int qrt_quantize(const qrt_kernels *, qrt_pool *, int format, const float *x,
                 const float *importance, uint8_t *out, int64_t rows, int64_t cols);
// Elements and bytes of a block of a format; false if there is no such format.
bool qrt_block_size(int format, int64_t *elements, int64_t *bytes);

// probe.c: GB/s read by all threads of the pool (negative: no memory), and 10^9 int8 operations per
// second.
double qrt_probe_bandwidth(qrt_pool *, int64_t mib);
double qrt_probe_int8(const qrt_kernels *, qrt_pool *);
#endif
