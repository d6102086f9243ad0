// Linear ops of a few x rows, without a panel: reading the weights takes longest then, so it is
// done in eight streams. Bits are those of linear.c.
#if defined(QRT_LEVEL_AVX512) || defined(QRT_LEVEL_AVX512BF16)
#    define QRT_HALF_VECTORS // eight rows side by side
#endif
#include "kernels.h"

#if defined(QRT_HALF_VECTORS) || defined(QRT_LEVEL_AVX2)
#    include "direct.h"

// acc, one for each x row: products with eight weight rows, stride bytes apart
typedef void (*eight_fn)(const product *, const uint8_t *src, int64_t stride, qf *acc);

// How long each of eight streams is, in rows, of at most `most`. Where their distance is about a
// multiple of 4 KiB they share a few sets of lines in the first-level cache: of some lengths, the
// first that keeps them well apart, or the best.
static int64_t stream_rows(int64_t most, int64_t row_bytes) {
    enum { PAGE = 4096, ENOUGH = 192 };
    int64_t best = most, best_apart = -1;
    for (int64_t each = most; each > 0 && each > most - 8 && best_apart < ENOUGH; each--) {
        int64_t apart = PAGE;
        for (int j = 1; j < QF; j++) {
            const int64_t d = j * each * row_bytes % PAGE, least = d < PAGE - d ? d : PAGE - d;
            if (least < apart) apart = least;
        }
        if (apart > best_apart) best = each, best_apart = apart;
    }
    return best;
}

// One row of each stream at a time; fewer than eight rows are left over and not done.
INLINE int64_t by_streams(const product *p, int64_t row0, int64_t rows, eight_fn eight) {
    const int64_t bytes = p->w->row_bytes, first = row0;
    for (int64_t each; rows >= QF; row0 += each * QF, rows -= each * QF) {
        each = stream_rows(rows / QF, bytes);
        for (int64_t r = row0; r < row0 + each; r++) {
            qf acc[QRT_DIRECT_X];
            eight(p, p->data + r * bytes, each * bytes, acc);
            for (int i = 0; i < p->n; i++) {
                float y[QF];
                qf_store(y, acc[i]);
                store_rows(p, i, r, each, y, QF);
            }
        }
    }
    return row0 - first;
}
#    define BY_STREAMS(way, name)                                                                  \
        static int64_t way##_product_##name(const product *p, int64_t row0, int64_t rows) {        \
            return by_streams(p, row0, rows, way##_eight_##name);                                  \
        }

#    define X(NAME, name)                                                                          \
        INLINE void direct_eight_##name(const product *p, const uint8_t *src, int64_t stride,      \
                                        qf *acc) {                                                 \
            for (int i = 0; i < p->n; i++)                                                         \
                acc[i] = direct_##name(src, stride, p->w->cols / 32,                               \
                                       x_row(p->x, p->x_rows, p->starts, i, 0, name##_group));     \
        }                                                                                          \
        BY_STREAMS(direct, name)
DIRECT_FORMATS(X)
#    undef X

#    ifdef QRT_LEVEL_AVX2
#        include "direct_rows.h"
#        define X(NAME, name, ...) BY_STREAMS(split, name)
SPLIT_FORMATS(X)
#        undef X
#    endif

static int64_t direct(const product *p, int64_t row0, int64_t rows) {
#    ifdef QRT_LEVEL_AVX2
    const int unsplit = 2; // with more x rows, it is faster to split weights once for all of them
#    else
    const int unsplit = 1; // with more, panels are faster
#    endif
    if (p->n <= unsplit) {
        switch (p->w->format) {
#    define X(NAME, name)                                                                          \
    case QRT_##NAME: return direct_product_##name(p, row0, rows);
            DIRECT_FORMATS(X)
#    undef X
        }
    }
#    ifdef QRT_LEVEL_AVX2
    switch (p->w->format) {
#        define X(NAME, name, ...)                                                                 \
        case QRT_##NAME: return split_product_##name(p, row0, rows);
        SPLIT_FORMATS(X)
#        undef X
    }
#    endif
    return 0;
}
#endif

void QRT_FILL(direct)(qrt_kernels *k) {
#ifdef DIRECT_FORMATS
    k->direct = direct;
#else
    (void)k;
#endif
}
