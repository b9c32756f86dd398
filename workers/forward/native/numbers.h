/* Numbers and vectors of them, for all kernels. */

#ifndef PILOTFISH_NUMBERS_H
#define PILOTFISH_NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Vectors are as wide as the processor's registers, and the number of sums fits its registers: spilled sums would make
   every product slower by an order of magnitude. Other widths than the processor's own are correct, but slow. */
#if !defined(LANES) && defined(__AVX512F__)
#define LANES 16    /* floats of a vector */
#define REGISTERS 32
#elif !defined(LANES)
#define LANES 8
#define REGISTERS 16
#endif

#if defined(__AVX512F__) && LANES == 16
#define IS_AVX512 1
#elif defined(__AVX2__) && LANES == 8
#define IS_AVX2 1
#endif
#if defined(IS_AVX512) && defined(__AVX512VNNI__)
#define HAS_VNNI 1
#else
#define HAS_VNNI 0
#endif
#define LINE 64     /* bytes of a cache line */
#define INLINE static inline __attribute__((always_inline))

#if defined(IS_AVX512) || defined(IS_AVX2)
#include <immintrin.h>
#endif

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

/* Kinds of numbers. INT8_TILES is INT8 in the order of tile registers and VNNI. Those from GROUPS4 to GROUPS8_TILES have a scale
   for each group of inputs, see groups.c: integers of 4 or 8 bits, floats of 8 bits (E4M3), 4 bits that choose one of 16
   numbers, or integers of 4 or 8 bits for tile registers and VNNI, see split_groups.c. FLOAT16 is a kind of scales alone, E4M3 one of
   stored keys and values. SUPER_BYTES and SUPER_NIBBLES are kinds of scales, too: integers of 8 or 4 bits, see packed_groups.h. */
enum {
    FLOAT32, BFLOAT16, INT8, INT8_TILES, GROUPS4, GROUPS8, GROUPS_E4M3, GROUPS_TABLE, GROUPS4_TILES, GROUPS8_TILES, FLOAT16, E4M3,
    SUPER_BYTES, SUPER_NIBBLES
};

/* e^x for x <= 0, within two units in the last place; very small results become 0. */
static inline float exponential(float x)
{
    float bounded = x < -87.0f ? -87.0f : x;
    float n = rintf(bounded * 1.44269504f);
    float r = fmaf(n, -0.693359375f, bounded);
    r = fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(p, r * r, r + 1.0f);
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}

/* `x` in every lane. */
static inline Vector same(float x)
{
#if defined(IS_AVX512)
    return (Vector)_mm512_set1_ps(x);
#elif defined(IS_AVX2)
    return (Vector)_mm256_set1_ps(x);
#else
    Vector all;
    for (int l = 0; l < LANES; l++) all[l] = x;
    return all;
#endif
}

/* a * b + c, rounded once. The compiler is free to round `a * b + c` once or twice, and decides anew for every copy of a
   function: where copies must agree to the bit, the sum is written with this function. */
static inline Vector fused(Vector a, Vector b, Vector c)
{
#if defined(IS_AVX512)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(IS_AVX2)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int l = 0; l < LANES; l++) c[l] = fmaf(a[l], b[l], c[l]);
    return c;
#endif
}

/* The same for a vector, bit for bit. */
static inline Vector exponentials(Vector x)
{
#if defined(IS_AVX512)
    const __m512 least = _mm512_set1_ps(-87.0f), bounded = _mm512_max_ps(least, (__m512)x);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(bounded, _mm512_set1_ps(1.44269504f)), 4);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0.693359375f), bounded);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, least, _CMP_NLT_UQ);
    return (Vector)_mm512_maskz_scalef_ps(counts, p, n); /* p * 2^n */
#else
    Vector power;
    for (int l = 0; l < LANES; l++) power[l] = exponential(x[l]);
    return power;
#endif
}

/* x times its sigmoid: SiLU, or swish. */
static inline Vector sigmoid_weighted(Vector x)
{
    const Words is_negative = (Words)(x < 0.0f), one = (Words)(Vector){0} + 0x3f800000u;
    const Vector small = exponentials((Vector)((Words)x | 0x80000000u)); /* e^-|x| */
    return x * (Vector)(((Words)small & is_negative) | (one & ~is_negative)) / (small + 1.0f);
}

static inline float widen_bfloat16(uint16_t value)
{
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

static inline float widen_float16(uint16_t value)
{
    uint32_t bits = (uint32_t)(value & 0x7fff) << 13;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    wide *= 0x1p112f; /* also right for subnormal numbers */
    memcpy(&bits, &wide, sizeof bits);
    if ((value & 0x7c00) == 0x7c00) bits |= 0x7f800000u;
    bits |= (uint32_t)(value & 0x8000) << 16;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* A number of 8 bits (E4M3) divided by 256: half precision with other bounds. */
static inline float widen_e4m3(uint8_t value)
{
    return widen_float16((uint16_t)((value & 0x80) << 8 | (value & 0x7f) << 7));
}

/* The same for LANES numbers. */
INLINE Vector widen_e4m3s(const uint8_t *from)
{
#if defined(IS_AVX512)
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
    return (Vector)_mm512_cvtph_ps(_mm256_or_si256(sign, _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7)));
#elif defined(IS_AVX2) && defined(__F16C__)
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)from));
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8);
    return (Vector)_mm256_cvtph_ps(_mm_or_si128(sign, _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), 7)));
#else
    Vector wide;
    for (int l = 0; l < LANES; l++) wide[l] = widen_e4m3(from[l]);
    return wide;
#endif
}

/* Round a number of at most 448 to E4M3: to nearest, ties to even. */
static inline uint8_t narrow_e4m3(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits >> 24 & 0x80, size = bits & 0x7fffffffu;
    if (size >= 121u << 23) return (uint8_t)(sign | (size - (120u << 23) + 0x7ffff + (size >> 20 & 1)) >> 20);
    const float rounded = fabsf(value) + 0x1p14f; /* below 2^-6 steps are of 2^-9, as those of this sum */
    memcpy(&bits, &rounded, sizeof bits);
    return (uint8_t)(sign | (bits - (141u << 23)));
}

/* Round to nearest, ties to even; NaN stays NaN. */
static inline uint16_t narrow_bfloat16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : rounded);
}

/* The same for a vector. */
static inline Halves narrow_bfloat16s(Vector values)
{
    const Words bits = (Words)values, is_nan = (Words)((bits & 0x7fffffffu) > 0x7f800000u);
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), Halves);
}

/* Store floats as FLOAT32 or BFLOAT16 numbers, from index `at` on. */
static inline void put(void *to, int64_t kind, int64_t at, const float *from, int64_t count)
{
    if (kind != BFLOAT16) {
        memcpy((float *)to + at, from, (size_t)count * sizeof *from);
        return;
    }
    uint16_t *narrow = (uint16_t *)to + at;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) *(Halves *)(narrow + i) = narrow_bfloat16s(*(const Vector *)(from + i));
    for (; i < count; i++) narrow[i] = narrow_bfloat16(from[i]);
}

#endif
