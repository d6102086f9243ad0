// Threads of a pool meet at barriers: each counts, and behind a barrier all have counted as far.
// Arguments: threads, rounds of a run, runs. Prints what is wrong.
#include "qrt.h"
#include <stdio.h>
#include <stdlib.h>

typedef struct {
    qrt_pool *pool;
    int rounds;
    long *counts; // a line of 64 bytes for each thread
} work;

static void rounds(void *arg, int thread, int threads) {
    const work *w = arg;
    for (int i = 0; i < w->rounds; i++) {
        w->counts[8 * thread]++;
        qrt_pool_barrier(w->pool);
        for (int t = 0; t < threads; t++)
            if (w->counts[8 * t] != w->counts[8 * thread]) printf("thread %d is elsewhere\n", t);
        qrt_pool_barrier(w->pool);
    }
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    const int threads = atoi(argv[1]), runs = atoi(argv[3]);
    work w = {.rounds = atoi(argv[2]), .counts = calloc((size_t)threads, 64)};
    if (!w.counts || qrt_pool_create(threads, &w.pool) != QRT_OK) return 2;
    for (int run = 1; run <= runs; run++) {
        qrt_pool_run(w.pool, rounds, &w);
        for (int t = 0; t < threads; t++)
            if (w.counts[8 * t] != (long)w.rounds * run)
                printf("run %d ended before thread %d\n", run, t);
    }
    qrt_pool_destroy(w.pool);
    free(w.counts);
    return 0;
}
