// Threads that wait for work, and for each other, spinning for a short while and then asleep.
#define _GNU_SOURCE
#include "qrt.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#if defined(__x86_64__)
#    include <immintrin.h>
#    define PAUSE() _mm_pause()
#elif defined(__aarch64__)
#    define PAUSE() __asm__ volatile("yield")
#else
#    define PAUSE() ((void)0)
#endif
#include <limits.h>
#include <sched.h>
#if defined(__linux__)
#    include <linux/futex.h>
#    include <sys/syscall.h>
#    include <unistd.h>
#endif

// Spins before a waiting worker sleeps: a few tens of microseconds, longer than the gap between the
// steps of one sequence costs on an idle machine would waste a core that the caller's own Python
// code needs.
#define SPINS_BEFORE_SLEEP 4000
// A barrier whose partner was descheduled offers its core after so many spins, and after some
// offers sleeps: a partner on the same core may else wait for a whole slice of time.
#define SPINS_BEFORE_YIELD 2000
#define YIELDS_BEFORE_SLEEP 20
// Where there are more threads than processors, one that waits is in the way of one that works.
#define SPINS_OF_MANY 50

struct qrt_pool {
    int threads;                   // the caller included
    int spins, yields, idle_spins; // before a thread sleeps, at a barrier and without work
    pthread_t *handles;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    void (*fn)(void *, int, int);
    void *arg;
    void *scratch;
    size_t scratch_bytes;
    _Alignas(64) atomic_uint generation; // goes up by one for each piece of work
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_uint phase;
    atomic_int asleep; // at a barrier
    atomic_int stop;
};

typedef struct {
    qrt_pool *pool;
    int thread;
} worker_arg;

static void *worker(void *p) {
    worker_arg a = *(worker_arg *)p;
    free(p);
    qrt_pool *pool = a.pool;
    unsigned seen = 0;
    for (;;) {
        int spins = 0;
        while (atomic_load_explicit(&pool->generation, memory_order_acquire) == seen) {
            if (++spins < pool->idle_spins) {
                PAUSE();
                continue;
            }
            pthread_mutex_lock(&pool->lock);
            while (atomic_load(&pool->generation) == seen)
                pthread_cond_wait(&pool->wake, &pool->lock);
            pthread_mutex_unlock(&pool->lock);
        }
        seen++;
        if (atomic_load(&pool->stop)) return NULL;
        pool->fn(pool->arg, a.thread, pool->threads);
        qrt_pool_barrier(pool);
    }
}

// Sleep unless the phase has changed; and wake all who do. Who sleeps is counted before the phase
// is looked at, and who changes the phase looks at the count after it, so nobody is forgotten.
static void sleep_in(qrt_pool *pool, unsigned phase) {
#if defined(__linux__)
    atomic_fetch_add(&pool->asleep, 1);
    syscall(SYS_futex, &pool->phase, FUTEX_WAIT_PRIVATE, phase, NULL, NULL, 0);
    atomic_fetch_sub(&pool->asleep, 1);
#else
    (void)pool, (void)phase;
    sched_yield();
#endif
}
static void wake_all(qrt_pool *pool) {
#if defined(__linux__)
    if (atomic_load(&pool->asleep))
        syscall(SYS_futex, &pool->phase, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#else
    (void)pool;
#endif
}

static int processors(void) {
#if defined(__linux__)
    cpu_set_t set;
    if (!sched_getaffinity(0, sizeof set, &set)) return CPU_COUNT(&set);
#endif
    return INT_MAX; // not known
}

static void publish(qrt_pool *pool) {
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add_explicit(&pool->generation, 1, memory_order_release);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
}

int qrt_pool_create(int threads, qrt_pool **out) {
    if (threads < 1) return QRT_BAD_ARGUMENT;
    qrt_pool *pool = aligned_alloc(64, (sizeof *pool + 63) / 64 * 64);
    if (!pool) return QRT_NO_MEMORY;
    memset(pool, 0, sizeof *pool);
    pool->threads = 1;
    const bool many = threads > processors();
    pool->spins = many ? SPINS_OF_MANY : SPINS_BEFORE_YIELD;
    pool->yields = many ? 0 : YIELDS_BEFORE_SLEEP;
    pool->idle_spins = many ? SPINS_OF_MANY : SPINS_BEFORE_SLEEP;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->handles = calloc((size_t)threads, sizeof *pool->handles);
    int status = pool->handles ? QRT_OK : QRT_NO_MEMORY;
    for (int i = 1; i < threads && status == QRT_OK; i++) {
        worker_arg *a = malloc(sizeof *a);
        if (!a) {
            status = QRT_NO_MEMORY;
            break;
        }
        *a = (worker_arg){pool, i};
        if (pthread_create(&pool->handles[i], NULL, worker, a)) {
            free(a);
            status = QRT_THREAD_FAILED;
            break;
        }
        pool->threads++;
    }
    if (status != QRT_OK) {
        qrt_pool_destroy(pool);
        return status;
    }
    *out = pool;
    return QRT_OK;
}

void qrt_pool_destroy(qrt_pool *pool) {
    if (!pool) return;
    atomic_store(&pool->stop, 1);
    publish(pool);
    for (int i = 1; i < pool->threads; i++) pthread_join(pool->handles[i], NULL);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
    free(pool->handles);
    free(pool->scratch);
    free(pool);
}

void *qrt_pool_scratch(qrt_pool *pool, size_t bytes) {
    if (bytes > pool->scratch_bytes) {
        free(pool->scratch);
        bytes = (bytes + 4095) & ~(size_t)4095;
        pool->scratch = aligned_alloc(4096, bytes);
        pool->scratch_bytes = pool->scratch ? bytes : 0;
    }
    return pool->scratch;
}

int qrt_pool_threads(const qrt_pool *pool) { return pool->threads; }

void qrt_pool_run(qrt_pool *pool, void (*fn)(void *, int, int), void *arg) {
    pool->fn = fn;
    pool->arg = arg;
    if (pool->threads > 1) publish(pool);
    fn(arg, 0, pool->threads);
    qrt_pool_barrier(pool);
}

void qrt_pool_barrier(qrt_pool *pool) {
    if (pool->threads == 1) return;
    unsigned phase = atomic_load_explicit(&pool->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&pool->arrived, 1, memory_order_acq_rel) == pool->threads - 1) {
        atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
        atomic_store(&pool->phase, phase + 1);
        wake_all(pool);
        return;
    }
    int waits = 0;
    while (atomic_load_explicit(&pool->phase, memory_order_acquire) == phase) {
        if (waits == pool->spins + pool->yields) sleep_in(pool, phase);
        else if (waits++ < pool->spins) PAUSE();
        else sched_yield();
    }
}
