// Runs .cu files unchanged on the CPU: included before a file, it gives the names of CUDA that our
// kernels use. Threads of a block are fibers on stacks of their own; they change places only where
// one waits (barriers, shuffles), in an order that the caller chooses. Blocks run one after
// another. Shared memory is filled with junk before each block and has exactly the size asked for,
// so that the address sanitizer sees what lies outside.
//
// What is an error here: a barrier or shuffle that some threads of the block or warp never reach.
#ifndef CUDA_HOST_H
#define CUDA_HOST_H
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#if defined(__SANITIZE_ADDRESS__)
#    include <sanitizer/common_interface_defs.h>
#    define HOST_ASAN 1
#endif

#define __global__
#define __device__
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define QRT_DYN_SMEM(T, name) T *name = (T *)host.shared

namespace cuda_host {

struct Dim3 {
    unsigned x, y, z;
};

enum State { READY, AT_BARRIER, AT_SHUFFLE, DONE };

struct Fiber {
    jmp_buf at;
    ucontext_t context;
    void *stopped; // top of its stack where it waits, if it was left by change()
    char *stack;
    State state;
    bool made;
    unsigned index, place, shuffles; // place: in the order
};

struct Warp {
    uint64_t value[2][32]; // by parity of the shuffle: a lane can be one ahead of another
    unsigned arrived[2];
};

const unsigned MOST = 1024;
#ifdef HOST_ASAN
const size_t STACK = 256 << 10;
#else
const size_t STACK = 64 << 10;
#endif

struct Host {
    Fiber fiber[MOST];
    Warp warp[MOST / 32];
    unsigned order[MOST];
    unsigned threads, done, waiting;
    Fiber *now;
    jmp_buf scheduler;
    ucontext_t main;
    void *stopped;
    char *shared;
    const void *main_stack;
    size_t main_size;
    void (*kernel)(void **);
    void **args;
    char error[200];
};

} // namespace cuda_host

static cuda_host::Host host;
static cuda_host::Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_host {

// ------------------------------------------------------------------------------------ fibers
// Jumps are made with setjmp, which costs no system call; the address sanitizer has to be told of
// another stack and cannot follow a jump. Its swapcontext forgets what lies around the variables of
// the whole stack, which takes most of the time of a run, so where we can we change stacks by hand.

static void enter(Fiber *f) {
    host.now = f;
    threadIdx.x = f->index % blockDim.x;
    threadIdx.y = f->index / blockDim.x % blockDim.y;
    threadIdx.z = f->index / blockDim.x / blockDim.y;
}

#if defined(HOST_ASAN) && defined(__x86_64__)
#    define HOST_CHANGE 1
// Keeps the registers that a call keeps on this stack, and goes on where another one was left.
__attribute__((naked, noipa)) static void change(void **, void *) {
    __asm__("push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15\n"
            "mov %rsp, (%rdi); mov %rsi, %rsp\n"
            "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret");
}
#endif

// Gives way to the next fiber in the order that can go on, else to the scheduler.
static void to_scheduler() {
    Fiber *f = host.now;
#ifdef HOST_ASAN
    void *fake;
    __sanitizer_start_switch_fiber(&fake, host.main_stack, host.main_size);
#    ifdef HOST_CHANGE
    change(&f->stopped, host.stopped);
#    else
    swapcontext(&f->context, &host.main);
#    endif
    __sanitizer_finish_switch_fiber(fake, NULL, NULL);
#else
    if (_setjmp(f->at)) return;
    for (unsigned i = 1; i < host.threads; i++) {
        unsigned place = f->place + i;
        Fiber *next = &host.fiber[host.order[place < host.threads ? place : place - host.threads]];
        if (next->state == READY && next->made) {
            enter(next);
            _longjmp(next->at, 1);
        }
    }
    _longjmp(host.scheduler, 1);
#endif
}

static void body() {
#ifdef HOST_ASAN
    __sanitizer_finish_switch_fiber(NULL, &host.main_stack, &host.main_size);
#endif
    for (;;) { // a fiber serves one block after another
        host.kernel(host.args);
        host.now->state = DONE;
        host.done++;
        to_scheduler();
    }
}

static void resume(Fiber *f) {
    enter(f);
    if (!f->made) {
        f->made = true;
        if (!f->stack) f->stack = (char *)malloc(STACK);
        getcontext(&f->context);
        f->context.uc_stack.ss_sp = f->stack;
        f->context.uc_stack.ss_size = STACK;
        f->context.uc_link = NULL;
        makecontext(&f->context, body, 0);
#if defined(HOST_CHANGE)
        void **top = (void **)(((uintptr_t)f->stack + STACK) & ~(uintptr_t)15) - 8;
        memset(top, 0, 8 * sizeof *top); // registers, and where body() would return to
        top[6] = (void *)body;
        f->stopped = top;
#elif !defined(HOST_ASAN)
        if (!_setjmp(host.scheduler)) setcontext(&f->context);
        return;
#endif
    }
#ifdef HOST_ASAN
    void *fake;
    __sanitizer_start_switch_fiber(&fake, f->stack, STACK);
#    ifdef HOST_CHANGE
    change(&host.stopped, f->stopped);
#    else
    swapcontext(&host.main, &f->context);
#    endif
    __sanitizer_finish_switch_fiber(fake, NULL, NULL);
#else
    if (!_setjmp(host.scheduler)) _longjmp(f->at, 1);
#endif
}

// ------------------------------------------------------------------------------------ waiting

static void barrier() {
    if (++host.waiting == host.threads) {
        host.waiting = 0;
        for (unsigned i = 0; i < host.threads; i++) host.fiber[i].state = READY;
    } else {
        host.now->state = AT_BARRIER;
        to_scheduler();
    }
}

// Every lane gives a word; when all have, `lane`'s word is returned.
static uint64_t exchange(uint64_t value, unsigned lane) {
    Fiber *f = host.now;
    Warp &w = host.warp[f->index / 32];
    unsigned parity = f->shuffles++ & 1;
    w.value[parity][f->index % 32] = value;
    if (++w.arrived[parity] == 32) {
        w.arrived[parity] = 0;
        for (unsigned i = 0; i < 32; i++) host.fiber[f->index / 32 * 32 + i].state = READY;
    } else {
        f->state = AT_SHUFFLE;
        to_scheduler();
    }
    return w.value[parity][lane & 31];
}

static bool run_block() {
    host.done = host.waiting = 0;
    memset(host.warp, 0, sizeof host.warp);
    for (unsigned i = 0; i < host.threads; i++) {
        host.fiber[i].state = READY;
        host.fiber[i].index = i;
        host.fiber[i].shuffles = 0;
    }
    while (host.done < host.threads) {
        bool progress = false;
        for (unsigned i = 0; i < host.threads; i++) {
            Fiber *f = &host.fiber[host.order[i]];
            if (f->state != READY) continue;
            progress = true;
            resume(f);
        }
        if (!progress) {
            snprintf(host.error, sizeof host.error,
                     "block (%u, %u, %u): %u of %u threads are done, the others wait for them",
                     blockIdx.x, blockIdx.y, blockIdx.z, host.done, host.threads);
            for (unsigned i = 0; i < host.threads; i++) host.fiber[i].made = false;
            return false;
        }
    }
    return true;
}

// order 0: threads and blocks as they are numbered; 1: backwards; others: threads at random.
static void make_order(int order) {
    const unsigned n = host.threads;
    for (unsigned i = 0; i < n; i++) host.order[i] = order == 1 ? n - 1 - i : i;
    uint64_t seed = (uint64_t)order;
    for (unsigned i = n; order > 1 && i > 1; i--) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        unsigned j = (unsigned)(seed >> 33) % i, swap = host.order[i - 1];
        host.order[i - 1] = host.order[j];
        host.order[j] = swap;
    }
    for (unsigned i = 0; i < n; i++) host.fiber[host.order[i]].place = i;
}

static const char *run_grid(void (*kernel)(void **), void **args, const unsigned *grid,
                            const unsigned *block, size_t shared, int order) {
    blockDim = {block[0], block[1], block[2]};
    gridDim = {grid[0], grid[1], grid[2]};
    host.threads = block[0] * block[1] * block[2];
    if (host.threads % 32 || host.threads > MOST || !host.threads) return "block of odd size";
    host.kernel = kernel, host.args = args;
    make_order(order);
    const uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];
    const char *error = NULL;
    for (uint64_t b = 0; b < blocks && !error; b++) {
        uint64_t at = order ? blocks - 1 - b : b;
        blockIdx = {(unsigned)(at % grid[0]), (unsigned)(at / grid[0] % grid[1]),
                    (unsigned)(at / grid[0] / grid[1])};
        host.shared = (char *)malloc(shared);
        memset(host.shared, order ? 0xa5 : 0xff, shared);
        if (!run_block()) error = host.error;
        free(host.shared);
    }
    return error;
}

// ------------------------------------------------------------------------------------ arguments

template <class T> struct Kind {
    static const char name = sizeof(T) == 8 ? 'l' : 'i';
};
template <class T> struct Kind<T *> {
    static const char name = 'p';
};
template <> struct Kind<float> {
    static const char name = 'f';
};

template <size_t... I> struct Numbers {}; // <utility> has it too, and takes the compiler long
template <size_t N, size_t... I> struct Upto : Upto<N - 1, N - 1, I...> {};
template <size_t... I> struct Upto<0, I...> {
    using type = Numbers<I...>;
};

template <auto F> struct Call;
template <class... A, void (*F)(A...)> struct Call<F> {
    static constexpr char kinds[] = {Kind<A>::name..., 0};
    template <size_t... I> static void call(void **args, Numbers<I...>) { F(*(A *)args[I]...); }
    static void run(void **args) { call(args, typename Upto<sizeof...(A)>::type()); }
};

} // namespace cuda_host

// What Python calls: the kinds of a kernel's arguments, and a launch, which gives NULL or an error.
#define HOST_KERNEL(name)                                                                          \
    extern "C" const char *kinds_##name() { return cuda_host::Call<&name>::kinds; }                \
    extern "C" const char *launch_##name(void **args, const unsigned *grid, const unsigned *block, \
                                         size_t shared, int order) {                               \
        return cuda_host::run_grid(cuda_host::Call<&name>::run, args, grid, block, shared, order); \
    }

// ------------------------------------------------------------------------------------ CUDA's names

static inline void __syncthreads() { cuda_host::barrier(); }
template <class T> static inline T __shfl_xor_sync(unsigned mask, T v, int lanes) {
    uint64_t word = 0;
    if (mask != 0xffffffffu) abort();
    memcpy(&word, &v, sizeof v);
    word = cuda_host::exchange(word, (host.now->index % 32) ^ (unsigned)lanes);
    memcpy(&v, &word, sizeof v);
    return v;
}
template <class T> static inline T __shfl_sync(unsigned mask, T v, int lane) {
    uint64_t word = 0;
    if (mask != 0xffffffffu) abort();
    memcpy(&word, &v, sizeof v);
    word = cuda_host::exchange(word, (unsigned)lane);
    memcpy(&v, &word, sizeof v);
    return v;
}
static inline unsigned __ballot_sync(unsigned mask, bool v) {
    const unsigned warp = host.now->index / 32, parity = host.now->shuffles & 1;
    unsigned all = 0;
    if (mask != 0xffffffffu) abort();
    cuda_host::exchange(v, 0);
    for (int lane = 0; lane < 32; lane++)
        all |= (unsigned)host.warp[warp].value[parity][lane] << lane;
    return all;
}
static inline int __popc(unsigned word) { return __builtin_popcount(word); }
static inline void __syncwarp() { cuda_host::exchange(0, 0); }
static inline float __uint_as_float(unsigned u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline unsigned __float_as_uint(float f) {
    unsigned u;
    memcpy(&u, &f, 4);
    return u;
}
static inline float __fmul_rn(float a, float b) { return a * b; }
#endif
