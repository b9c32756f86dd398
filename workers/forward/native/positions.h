/* The positions that a query sees, and how their keys are read from the pool. For both kernels of attention. */

#ifndef PILOTFISH_POSITIONS_H
#define PILOTFISH_POSITIONS_H

#include "attention.h"

#if defined(IS_AVX512) || defined(IS_AVX2)
#include <immintrin.h>
#endif

#define HALVES 2        /* vectors of a tile */
#define KEYS (HALVES * LANES) /* positions per tile: one per lane */
#define MOST_DIM 256    /* largest head dimension */
#define ALL (UINT32_MAX >> (32 - KEYS)) /* all positions of a tile, as bits */

/* Vectors begin with a cache line: one that lies in two lines takes twice as long to read. */
#define ALIGNED __attribute__((aligned(LINE)))

/* The positions among first … first + KEYS - 1 that the token sees, as bits. */
static inline uint32_t visible(const Step *step, const Layer *layer, int64_t token, int64_t first)
{
    const int64_t own = step->position[token];
    if (!layer->window && first + KEYS <= own + 1) return ALL;
    uint32_t seen = 0;
    for (int k = 0; k < KEYS && first + k <= own; k++) {
        const int64_t at = first + k;
        if (!layer->window || own - at < layer->window || at < layer->sinks) seen |= 1u << k;
    }
    return seen;
}

/* The number of a tile's positions up to the last of these. */
static inline int last_seen(uint32_t seen)
{
    return seen ? 32 - __builtin_clz(seen) : 0;
}

/* The slots of the keys and values of a tile's positions whose bits are set in `seen`; -1 for the others. */
static void locate(const Step *step, const Layer *layer, int64_t row, int64_t token, int64_t first, uint32_t seen, int64_t *slots)
{
    const int64_t size = step->block_size, base = step->base_len[row];
    const int32_t *blocks = step->blocks + (layer->table * step->rows + row) * step->most_blocks;
    int64_t number = first / size, offset = first % size; /* of the next committed position */
    for (int k = 0; k < KEYS; k++) {
        slots[k] = -1;
        if ((seen >> k) & 1) {
            int64_t block = number, within = offset;
            if (first + k >= base) { /* a node of the tree: one of the token's own ancestors, or itself */
                const int64_t place = base + step->path[token * step->most_depth + first + k - base];
                block = place / size, within = place % size;
            }
            if (blocks[block] >= 0) slots[k] = blocks[block] * size + within;
        }
        if (++offset == size) offset = 0, number++;
    }
}

static inline float sum_of_lanes(Vector part)
{
    float sum = 0.0f;
    for (int l = 0; l < LANES; l++) sum += part[l];
    return sum;
}

/* Transpose LANES vectors; `stride` numbers are from one result to the next. */
static inline void transpose(const Vector *rows, const int64_t stride, float *to)
{
#if defined(IS_AVX512)
    __m512 a[LANES], b[LANES];
    for (int i = 0; i < LANES; i += 2) {
        a[i] = _mm512_unpacklo_ps((__m512)rows[i], (__m512)rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps((__m512)rows[i], (__m512)rows[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; j++) {
            const __m512d low = _mm512_castps_pd(a[i + j]), high = _mm512_castps_pd(a[i + j + 2]);
            b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    for (int i = 0; i < 4; i++) { /* b[4 g + i]: columns i, 4 + i, 8 + i, 12 + i of rows 4 g … 4 g + 3 */
        const __m512 p = _mm512_shuffle_f32x4(b[i], b[4 + i], 0x88), q = _mm512_shuffle_f32x4(b[i], b[4 + i], 0xdd);
        const __m512 r = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0x88), s = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0xdd);
        _mm512_storeu_ps(to + i * stride, _mm512_shuffle_f32x4(p, r, 0x88));
        _mm512_storeu_ps(to + (4 + i) * stride, _mm512_shuffle_f32x4(q, s, 0x88));
        _mm512_storeu_ps(to + (8 + i) * stride, _mm512_shuffle_f32x4(p, r, 0xdd));
        _mm512_storeu_ps(to + (12 + i) * stride, _mm512_shuffle_f32x4(q, s, 0xdd));
    }
#elif defined(IS_AVX2)
    __m256 a[LANES], b[LANES];
    for (int i = 0; i < LANES; i += 2) {
        a[i] = _mm256_unpacklo_ps((__m256)rows[i], (__m256)rows[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps((__m256)rows[i], (__m256)rows[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; j++) { /* b[i + 2 j], b[i + 2 j + 1]: columns 2 j, 2 j + 1 and, in the upper half, + 4 */
            b[i + 2 * j] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0x44);
            b[i + 2 * j + 1] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * stride, _mm256_permute2f128_ps(b[i], b[4 + i], 0x20));
        _mm256_storeu_ps(to + (4 + i) * stride, _mm256_permute2f128_ps(b[i], b[4 + i], 0x31));
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) to[j * stride + i] = rows[i][j];
#endif
}

/* Transpose the numbers from `from` on of LANES keys, `2 * LANES` of each, into their half of the tile, as pairs. */
static inline void transpose_pairs(const uint16_t *const *keys, int64_t from, float *to)
{
    Vector pairs[LANES];
#pragma GCC unroll 16
    for (int k = 0; k < LANES; k++) pairs[k] = (Vector)*(const Words *)(keys[k] + from);
    transpose(pairs, KEYS, to);
}

static inline float query_at(const Layer *layer, int64_t at)
{
    return layer->query_kind == BFLOAT16 ? widen_bfloat16(((const uint16_t *)layer->query)[at]) : ((const float *)layer->query)[at];
}

#endif
