// How files of kernels/ see their instruction level. Each file is built once per level with
// QRT_LEVEL_<X> defined; everything in it is static except one fill function, whose name carries
// the level.
#ifndef QRT_KERNELS_H
#define QRT_KERNELS_H
#include "../qrt.h"

// A file that says QRT_HALF_VECTORS works in vectors of 256 bits at AVX-512 too.
#if (defined(QRT_LEVEL_AVX512) || defined(QRT_LEVEL_AVX512BF16)) && !defined(QRT_HALF_VECTORS)
#    include "../simd/avx512.h"
#elif defined(QRT_LEVEL_AVX2) || defined(QRT_HALF_VECTORS)
#    include "../simd/avx2.h"
#elif defined(QRT_LEVEL_NEON)
#    include "../simd/neon.h"
#else
#    include "../simd/scalar.h"
#endif

#define QRT_PASTE2(a, b) a##_##b
#define QRT_PASTE(a, b) QRT_PASTE2(a, b)
#define QRT_FILL(file) QRT_PASTE(qrt_fill_##file, QRT_LEVEL) // void fill(qrt_kernels *)
#define INLINE static inline __attribute__((always_inline))
#endif
