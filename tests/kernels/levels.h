// Shared by the files of the level driver: random data, running an op, comparing.
#ifndef LEVELS_H
#define LEVELS_H
#include "qrt.h"
#include "kernels/scratch.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

extern qrt_kernels level, base; // under test; scalar
extern const bool rounds_x;     // whether BF16 weights meet x in bfloat16

// Memory of one case; each piece is an allocation of its own, so that a sanitizer sees its ends.
void *take(int64_t bytes);
void release_all(void);
double uniform(void); // in -1..1
float *random_floats(int64_t n, double scale);
float *unset_floats(int64_t n); // NaN
double *doubles(int64_t n);
void *copy_of(const void *from, int64_t bytes);
qrt_quant quant_of(int64_t rows, int64_t cols); // unset

static inline double sigmoid(double x) { return 1 / (1 + exp(-x)); }
static inline qrt_view view(float *p, int64_t ld, int heads, int dim, int stride) {
    return (qrt_view){p, ld, heads, dim, stride};
}
static inline qrt_view rows_of(float *p, int64_t width) {
    return (qrt_view){p, width, 1, (int32_t)width, (int32_t)width};
}

// Runs the op on threads of its own, with the scratch that a step would give it, filled with 0xff.
void run_op(const qrt_op *, const qrt_batch *, const qrt_state *, int threads);

// What a check is called in messages; kept until the next call.
void name_case(const char *format, ...) __attribute__((format(printf, 1, 2)));
// Root mean square of the difference, over that of `want`, is below the bound.
void check_near(const char *what, const float *got, const double *want, int64_t n, double bound);
void check_same(const char *what, const void *a, const void *b, int64_t bytes);
void check(const char *what, bool holds);
// quant holds these rows as the quantiser is defined, bit for bit.
void check_quant(const qrt_quant *quant, const float *x, int64_t rows);

void test_rows(void);   // levels_rows.c
void test_state(void);  // levels_state.c
void test_linear(void); // levels_linear.c
#endif
