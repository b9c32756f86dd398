/* The packed form of weights in groups: see groups.c and split_groups.c, which multiply them.

   A block is its groups, one after another. Each has COLUMNS scales, COLUMNS zeros or minima unless the matrix has neither, and
   the values: [group / WORD, COLUMNS] words for 4 bits, [group, COLUMNS] bytes for 8. GROUPS8_TILES are [group / 4, COLUMNS, 4]
   bytes, in the order in which words of 4 bits are widened: the even inputs of WORD neighbours, then the odd ones. */

#ifndef PILOTFISH_PACKED_GROUPS_H
#define PILOTFISH_PACKED_GROUPS_H

#include "products.h"

#define WORD 8 /* values of 4 bits in a word */

INLINE int has_words(const int64_t kind)
{
    return kind == GROUPS4 || kind == GROUPS_TABLE || kind == GROUPS4_TILES;
}

INLINE int64_t number_bytes(const Matrix *matrix)
{
    return matrix->scale_kind == FLOAT32 ? sizeof(float) : sizeof(uint16_t);
}

INLINE int64_t head_bytes(const Matrix *matrix)
{
    return COLUMNS * number_bytes(matrix) * (matrix->offset == NO_OFFSET ? 1 : 2);
}

INLINE int64_t group_bytes(const Matrix *matrix)
{
    return head_bytes(matrix) + matrix->group * COLUMNS / (has_words(matrix->kind) ? 2 : 1);
}

INLINE int64_t groups_of(const Matrix *matrix)
{
    return (matrix->inputs + matrix->group - 1) / matrix->group;
}

INLINE const char *group_at(const Matrix *matrix, int64_t block, int64_t group)
{
    return (const char *)matrix->weights + (block * groups_of(matrix) + group) * group_bytes(matrix);
}

static inline float number(const void *from, int64_t kind, int64_t at)
{
    if (kind == FLOAT16) return widen_float16(((const uint16_t *)from)[at]);
    if (kind == BFLOAT16) return widen_bfloat16(((const uint16_t *)from)[at]);
    return ((const float *)from)[at];
}

/* LANES scales, zeros or minima. */
INLINE Vector numbers(const void *from, int64_t kind)
{
    if (kind == FLOAT32) return *(const Vector *)from;
#if defined(IS_AVX512)
    if (kind == FLOAT16) return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(IS_AVX2) && defined(__F16C__)
    if (kind == FLOAT16) return (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    if (kind == FLOAT16) {
        Vector wide;
        for (int l = 0; l < LANES; l++) wide[l] = widen_float16(((const uint16_t *)from)[l]);
        return wide;
    }
#endif
    return (Vector)(__builtin_convertvector(*(const Halves *)from, Words) << 16);
}

INLINE Vector floats(Words integers)
{
#if defined(IS_AVX512)
    return (Vector)_mm512_cvtepi32_ps((__m512i)integers);
#elif defined(IS_AVX2)
    return (Vector)_mm256_cvtepi32_ps((__m256i)integers);
#else
    Vector wide;
    for (int l = 0; l < LANES; l++) wide[l] = (float)(int32_t)integers[l];
    return wide;
#endif
}

/* What a group of a block has beside its values, widened once for all rows. */
typedef struct {
    Vector scale[2], offset[2]; /* the offset is a minimum, or minus the zero */
} Head;

INLINE Head head_of(const Matrix *matrix, const char *at)
{
    const int64_t kind = matrix->scale_kind, half = LANES * number_bytes(matrix);
    Head head = {.scale = {numbers(at, kind), numbers(at + half, kind)}};
    at += 2 * half;
    if (matrix->offset == NO_OFFSET) head.offset[0] = head.offset[1] = same(-matrix->zero);
    else head.offset[0] = numbers(at, kind), head.offset[1] = numbers(at + half, kind);
    if (matrix->offset == ZERO) head.offset[0] = -head.offset[0], head.offset[1] = -head.offset[1];
    return head;
}

/* Add a group's products to the sums of one row. `inputs` is the sum of the group's inputs. */
INLINE void apply_group(const Head *head, int64_t offset, float inputs, Vector first, Vector second, Vector *sum)
{
    const Vector all = same(inputs);
    if (offset == MINIMUM) {
        sum[0] = fused(head->offset[0], all, sum[0]);
        sum[1] = fused(head->offset[1], all, sum[1]);
    } else {
        first = fused(head->offset[0], all, first);
        second = fused(head->offset[1], all, second);
    }
    sum[0] = fused(head->scale[0], first, sum[0]);
    sum[1] = fused(head->scale[1], second, sum[1]);
}

#endif
