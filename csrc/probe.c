// What the machine can do: memory read by all threads, and the int8 products of the best kernels on
// data in cache.
#define _POSIX_C_SOURCE 200112L
#include "qrt.h"
#include <stdlib.h>
#include <time.h>

#define SLICE (32 << 20)
#define ROUNDS 24

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct {
    qrt_pool *pool;
    const uint8_t *data;
    size_t bytes;
    double best;      // seconds of the fastest slice
    uint64_t sum[64]; // keeps the reads alive
} reading;

// Several streams side by side, as the rows of a product with few rows are read: the prefetchers of
// a core fetch more from several than from one.
static uint64_t read_all(const uint8_t *p, size_t n) {
    enum { STREAMS = 8, LINE = 8 }; // words of a cache line
    const size_t part = n / (8 * LINE * STREAMS) * LINE;
    const uint64_t *w = (const uint64_t *)p;
    uint64_t s[LINE] = {0};
    for (size_t i = 0; i < part; i += LINE)
        for (int stream = 0; stream < STREAMS; stream++)
            for (int j = 0; j < LINE; j++) s[j] ^= w[stream * part + i + j];
    return s[0] ^ s[1] ^ s[2] ^ s[3] ^ s[4] ^ s[5] ^ s[6] ^ s[7];
}

static void read_slices(void *arg, int thread, int threads) {
    reading *r = arg;
    size_t slices = r->bytes / SLICE, share = SLICE / (size_t)threads & ~(size_t)4095;
    for (int round = 0; round < ROUNDS; round++) {
        const uint8_t *p = r->data + (size_t)round % slices * SLICE + share * (size_t)thread;
        qrt_pool_barrier(r->pool);
        double t0 = now();
        r->sum[thread % 64] ^= read_all(p, share);
        qrt_pool_barrier(r->pool);
        double t = now() - t0;
        if (thread == 0 && round > 1 && t < r->best) r->best = t;
    }
}

double qrt_probe_bandwidth(qrt_pool *pool, int64_t mib) {
    size_t bytes = (size_t)(mib < 64 ? 64 : mib) << 20;
    uint8_t *data = aligned_alloc(4096, bytes);
    if (!data) return -1;
    for (size_t i = 0; i < bytes; i += 8) *(uint64_t *)(data + i) = i;
    reading r = {.pool = pool, .data = data, .bytes = bytes, .best = 1e9};
    qrt_pool_run(pool, read_slices, &r);
    free(data);
    int threads = qrt_pool_threads(pool);
    size_t read = (SLICE / (size_t)threads & ~(size_t)4095) * (size_t)threads;
    return (double)read / r.best / 1e9;
}

// The level's own peak loop: independent multiply-adds of int8 on registers.
typedef struct {
    qrt_pool *pool;
    const qrt_kernels *kernels;
    double best;
} peak;

static void peak_slices(void *arg, int thread, int threads) {
    peak *p = arg;
    (void)threads;
    for (int round = 0; round < ROUNDS; round++) {
        qrt_pool_barrier(p->pool);
        double t0 = now();
        double ops = p->kernels->int8_peak();
        qrt_pool_barrier(p->pool);
        double rate = ops / (now() - t0);
        if (thread == 0 && rate > p->best) p->best = rate;
    }
}

double qrt_probe_int8(const qrt_kernels *kernels, qrt_pool *pool) {
    peak p = {pool, kernels, 0};
    qrt_pool_run(pool, peak_slices, &p);
    return p.best * qrt_pool_threads(pool) / 1e9;
}
