/* Products of numbers in registers, to measure how many the processor computes per second. */

#include "products.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define OPAQUE(VECTOR) __asm__ volatile("" : "+v"(VECTOR))
#else
#define OPAQUE(VECTOR) (void)(VECTOR)
#endif

#define SUMS 12 /* enough to hide the latency of a product, and few enough for sixteen registers */

/* `count` times SUMS vector products on every thread; returns the multiplications and additions of each thread. */
double pilotfish_peak(int64_t kind, int64_t count)
{
#pragma omp parallel
    {
        Vector sums[SUMS] = {{0}}, x = (Vector){0} + 0.5f, y = x;
#pragma GCC unroll 12
        for (int s = 0; s < SUMS; s++) OPAQUE(sums[s]); /* or the compiler computes equal sums once */
        for (int64_t i = 0; i < count; i++) {
            OPAQUE(x);
            OPAQUE(y);
#if defined(IS_AVX512) && defined(__AVX512BF16__)
            if (kind == BFLOAT16) {
#pragma GCC unroll 12
                for (int s = 0; s < SUMS; s++) sums[s] = (Vector)_mm512_dpbf16_ps((__m512)sums[s], (__m512bh)x, (__m512bh)y);
                continue;
            }
#endif
#pragma GCC unroll 12
            for (int s = 0; s < SUMS; s++) sums[s] = sums[s] * x + y;
        }
#pragma GCC unroll 12
        for (int s = 0; s < SUMS; s++) OPAQUE(sums[s]);
    }
    return 2.0 * SUMS * LANES * (double)count * (kind == BFLOAT16 && HAS_BFLOAT16_PRODUCTS ? 2 : 1);
}
