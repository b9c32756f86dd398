/* The packed form of weights in groups: see groups.c and split_groups.c, which multiply them.

   A block is its groups, one after another. Each has COLUMNS scales, COLUMNS zeros or minima unless the matrix has neither, and
   the values: [group / WORD, COLUMNS] words for 4 bits, [group, COLUMNS] bytes for 8. GROUPS8_TILES are [group / 4, COLUMNS, 4]
   bytes, in the order in which words of 4 bits are widened: the even inputs of WORD neighbours, then the odd ones.

   Of k-quants, the scales and minima are small integers: SUPER_BYTES has COLUMNS bytes of each, SUPER_NIBBLES one byte for both, the
   scale in its low half. Before every `super` groups stand COLUMNS float16 units of the scales, and as many of the minima, which
   these integers are multiplied with. A minimum is minus its product.

   Values of 2, 3, 5 and 6 bits are in planes, and are unpacked group by group to the bytes that the others have, P of them. In
   a plane of `low` bits, byte i has the low bits of the values in byte i of the first half, and above them those of the second
   half. It is followed by a plane of the bits above, where byte i has those of bytes i, i + P / parts, i + 2 * P / parts and so
   on. */

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
    if (matrix->super) return COLUMNS * (matrix->offset == MINIMUM && matrix->scale_kind == SUPER_BYTES ? 2 : 1);
    return COLUMNS * number_bytes(matrix) * (matrix->offset == NO_OFFSET ? 1 : 2);
}

/* Bytes of the values of a group once they are unpacked. */
INLINE int64_t unpacked_bytes(const Matrix *matrix)
{
    return matrix->group * COLUMNS / (has_words(matrix->kind) ? 2 : 1);
}

INLINE int64_t group_bytes(const Matrix *matrix)
{
    static const int64_t eighths[] = {[WHOLE] = 8, [PLANES_2] = 4, [PLANES_2_1] = 6, [PLANES_4_1] = 5, [PLANES_4_2] = 6};
    return head_bytes(matrix) + unpacked_bytes(matrix) / 8 * eighths[matrix->planes];
}

INLINE int64_t groups_of(const Matrix *matrix)
{
    return (matrix->inputs + matrix->group - 1) / matrix->group;
}

/* Bytes of the units before `super` groups. */
INLINE int64_t unit_bytes(const Matrix *matrix)
{
    return COLUMNS * (int64_t)sizeof(uint16_t) * (matrix->offset == MINIMUM ? 2 : 1);
}

INLINE int64_t block_bytes(const Matrix *matrix)
{
    const int64_t groups = groups_of(matrix), units = matrix->super ? groups / matrix->super * unit_bytes(matrix) : 0;
    return groups * group_bytes(matrix) + units;
}

/* Where a group is, and its units, if it has some. */
typedef struct {
    const char *group, *units;
    int64_t left; /* groups with these units, this one among them */
} Place;

INLINE Place place_of(const Matrix *matrix, int64_t block, int64_t group)
{
    const char *start = (const char *)matrix->weights + block * block_bytes(matrix);
    const int64_t super = matrix->super, bytes = group_bytes(matrix);
    if (!super) return (Place){start + group * bytes, NULL, 0};
    const char *units = start + group / super * (unit_bytes(matrix) + super * bytes);
    return (Place){units + unit_bytes(matrix) + group % super * bytes, units, super - group % super};
}

/* Move on to the next group of a block. A group has `bytes` bytes. */
INLINE void move_to_next(const Matrix *matrix, int64_t bytes, Place *place)
{
    place->group += bytes;
    if (!matrix->super || --place->left) return;
    place->units = place->group, place->group += unit_bytes(matrix), place->left = matrix->super;
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

/* LANES integers of 8 bits, which have a sign. */
INLINE Words integers(const void *from)
{
#if defined(IS_AVX512)
    return (Words)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(IS_AVX2)
    return (Words)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    Words wide;
    for (int l = 0; l < LANES; l++) wide[l] = (uint32_t)(int32_t)((const int8_t *)from)[l];
    return wide;
#endif
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

/* The units of scales and of minima, widened; the latter are negative. */
INLINE Head units_of(const Matrix *matrix, const char *at)
{
    const int64_t half = LANES * (int64_t)sizeof(uint16_t);
    Head units = {.scale = {numbers(at, FLOAT16), numbers(at + half, FLOAT16)}};
    if (matrix->offset == MINIMUM)
        units.offset[0] = -numbers(at + 2 * half, FLOAT16), units.offset[1] = -numbers(at + 3 * half, FLOAT16);
    return units;
}

/* What a group has whose scales and minima are integers. Each product with a unit is rounded by itself, as the reference does. */
INLINE Head head_of_integers(const Matrix *matrix, const char *at, const Head *units)
{
    Words scale[2] = {integers(at), integers(at + LANES)}, minimum[2];
    if (matrix->scale_kind == SUPER_NIBBLES) {
        for (int half = 0; half < 2; half++) minimum[half] = scale[half] >> 4 & 0xf, scale[half] &= 0xf;
    } else if (matrix->offset == MINIMUM) {
        minimum[0] = integers(at + COLUMNS), minimum[1] = integers(at + COLUMNS + LANES);
    }
    Head head;
    for (int half = 0; half < 2; half++) {
        head.scale[half] = units->scale[half] * floats(scale[half]);
        head.offset[half] = matrix->offset == MINIMUM ? units->offset[half] * floats(minimum[half]) : same(-matrix->zero);
    }
    return head;
}

/* What a group has whose scales, zeros and minima are floats. */
INLINE Head head_of_numbers(const Matrix *matrix, const char *at)
{
    const int64_t kind = matrix->scale_kind, half = LANES * number_bytes(matrix);
    Head head = {.scale = {numbers(at, kind), numbers(at + half, kind)}};
    at += 2 * half;
    if (matrix->offset == NO_OFFSET) head.offset[0] = head.offset[1] = same(-matrix->zero);
    else head.offset[0] = numbers(at, kind), head.offset[1] = numbers(at + half, kind);
    if (matrix->offset == ZERO) head.offset[0] = -head.offset[0], head.offset[1] = -head.offset[1];
    return head;
}

/* What the group at a place has beside its values, in a block that is `further` bytes further on. */
INLINE Head head_of(const Matrix *matrix, const Place *place, int64_t further)
{
    if (!matrix->super) return head_of_numbers(matrix, place->group + further);
    const Head units = units_of(matrix, place->units + further);
    return head_of_integers(matrix, place->group + further, &units);
}

#define MOST_UNPACKED (32 * COLUMNS) /* bytes of a group's values that are unpacked */

/* Unpack the values of a group whose matrix has planes: `from` are the bytes after its head. */
void pilotfish_unpack_planes(const Matrix *matrix, const char *from, char *to);

/* Byte `index` of those that `pilotfish_unpack_planes` writes. */
uint8_t pilotfish_unpacked_byte(const Matrix *matrix, const char *from, int64_t index);

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
