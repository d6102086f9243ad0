// Which instruction levels this build has, which of them processor and operating system support,
// and their kernels.
#include "qrt.h"
#include <pthread.h>
#if defined(__x86_64__)
#    include <cpuid.h>
#endif

#define FILES(X, level)                                                                            \
    X(attention, level)                                                                            \
    X(delta_net, level)                                                                            \
    X(dequantize, level)                                                                           \
    X(direct, level)                                                                               \
    X(linear, level)                                                                               \
    X(norms, level)                                                                                \
    X(quantize_iq4, level)                                                                         \
    X(quantize_k, level)                                                                           \
    X(quantize_simple, level)                                                                      \
    X(rows, level)
#define DECLARE(file, level) void qrt_fill_##file##_##level(qrt_kernels *);
#define CALL(file, level) qrt_fill_##file##_##level(&k);

#if defined(__x86_64__)
#    define LEVELS(X) X(scalar) X(avx2) X(avx512) X(avx512bf16)
#elif defined(__aarch64__)
#    define LEVELS(X) X(scalar) X(neon)
#else
#    define LEVELS(X) X(scalar)
#endif

#define X(level) FILES(DECLARE, level)
LEVELS(X)
#undef X

const char *const qrt_isa_names[] = {
#define X(level) #level,
    LEVELS(X)
#undef X
        NULL};
enum {
#define X(level) LEVEL_##level,
    LEVELS(X)
#undef X
        N_LEVELS
};

#if defined(__x86_64__)
static uint64_t saved_state(void) { // which register sets the operating system keeps
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

static int highest(void) {
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return LEVEL_scalar;
    const uint32_t fma = 1u << 12, osxsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;
    if ((c & (fma | osxsave | avx | f16c)) != (fma | osxsave | avx | f16c)) return LEVEL_scalar;
    uint64_t saved = saved_state();
    if ((saved & 6) != 6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & 1u << 5)) {
        return LEVEL_scalar;
    }
    const uint32_t f_dq_bw_vl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, vnni = 1u << 11;
    if ((saved & 0xe0) != 0xe0 || (b & f_dq_bw_vl) != f_dq_bw_vl || !(c & vnni)) return LEVEL_avx2;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & 1u << 5)) return LEVEL_avx512;
    return LEVEL_avx512bf16;
}
#elif defined(__aarch64__)
#    include <sys/auxv.h>
static int highest(void) {
    const unsigned long fphp_asimdhp = 1ul << 9 | 1ul << 10, asimddp = 1ul << 20;
    unsigned long caps = getauxval(AT_HWCAP);
    return (caps & (fphp_asimdhp | asimddp)) == (fphp_asimdhp | asimddp) ? LEVEL_neon
                                                                         : LEVEL_scalar;
}
#else
static int highest(void) { return LEVEL_scalar; }
#endif

static int level_of(const char *name) {
    if (!name) return highest();
    for (int i = 0; i < N_LEVELS; i++)
        if (!strcmp(name, qrt_isa_names[i])) return i;
    return -1;
}

int qrt_isa_usable(const char *name) {
    int level = level_of(name);
    return level >= 0 && level <= highest();
}

static qrt_kernels tables[N_LEVELS];

static void fill_tables(void) {
    qrt_kernels k = {0};
    const int top = highest(); // even the fill functions of a higher level may use its instructions
#define X(level)                                                                                   \
    if (LEVEL_##level <= top) {                                                                    \
        FILES(CALL, level)                                                                         \
        k.isa = #level;                                                                            \
        tables[LEVEL_##level] = k;                                                                 \
    }
    LEVELS(X)
#undef X
}

const qrt_kernels *qrt_isa(const char *name) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (!qrt_isa_usable(name)) return NULL;
    pthread_once(&once, fill_tables);
    return &tables[level_of(name)];
}
