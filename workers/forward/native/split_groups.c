/* Products of 4-bit and 8-bit integers in groups with activations that are split into int8 numbers.

   The inputs of a row's group share a step, so that one large activation makes no other group coarse. Each input is an integer
   of 16 bits: a coarse int8 number and a fine one. Sums of integers are exact, so tile registers (group_tiles.c) and vectors
   find the same ones, whatever the number of rows. A group's sum is then a float, and scale, zero and minimum are applied to it
   as in groups.c, group after group.

   VNNI multiplies unsigned bytes with signed ones, four of each for every sum. Values of 4 bits are unsigned; those of 8 bits
   become so by adding 128, and what that adds to a sum, 128 times the sum of the activations, is subtracted. */

#include <omp.h>
#include <stddef.h>

#include "finish.h"
#include "split_groups.h"
#include "tiles.h"

#define LARGEST 32512.0f   /* of the integers: 127 coarse steps */
#define TILE_ROW 64        /* inputs that a row of a tile register holds */
#define MOST_GROUP 128     /* inputs of a group: 32 bits hold its sums */
#define CHUNK (256 * 1024) /* bytes of split rows of a chunk */
#define LEAST_ROWS 16      /* rows of a chunk at least: those of a tile register, twice */
#define MOST_ROWS 256
#define ON_TILES 28        /* rows from which on tile registers are faster than vectors; they are for LEAST_ROWS, too */
#define AHEAD 4096         /* bytes of weights to prefetch */
#define EXCESS 128         /* what makes values of 8 bits unsigned */

int pilotfish_splits_groups(int64_t group)
{
    return (pilotfish_has_tiles() || HAS_VNNI) && group % WORD == 0 && (group <= TILE_ROW || group == MOST_GROUP);
}

/* --- the inputs ------------------------------------------------------------------------------- */

/* Split `count` inputs, at most MOST_GROUP: each WORD of them becomes its even ones and then its odd ones. Returns their sum. */
static int32_t split_integers(const float *x, int64_t count, float factor, int8_t *coarse, int8_t *fine)
{
    int64_t i = 0;
    int32_t sum = 0;
#if defined(IS_AVX512)
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    __m512i lanes = _mm512_setzero_si512();
    for (; i + LANES <= count; i += LANES) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(factor)));
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(1 << (COARSE_BITS - 1))), COARSE_BITS);
        _mm_storeu_si128((__m128i *)(coarse + i), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(high), order));
        _mm_storeu_si128((__m128i *)(fine + i), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(whole), order)); /* the low 8 bits */
        lanes = _mm512_add_epi32(lanes, whole);
    }
    sum = _mm512_reduce_add_epi32(lanes);
#endif
    for (; i < count; i++) {
        const int32_t whole = (int32_t)rintf(x[i] * factor), high = (whole + (1 << (COARSE_BITS - 1))) >> COARSE_BITS;
        const int64_t to = i / WORD * WORD + i % 2 * (WORD / 2) + i % WORD / 2;
        coarse[to] = (int8_t)high, fine[to] = (int8_t)(whole - high * (1 << COARSE_BITS));
        sum += whole;
    }
    return sum;
}

/* The largest absolute value, or a number that is not finite. */
static float largest_of(const float *x, int64_t count)
{
    uint32_t largest = 0; /* absolute values, whose bits are in their order */
    float most;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    memcpy(&most, &largest, sizeof most);
    return most;
}

static void split_rows(const Matrix *matrix, const float *x, const SplitGroups *to)
{
    const int64_t group = matrix->group, groups = groups_of(matrix);
    for (int64_t r = 0; r < to->rows; r++, x += matrix->inputs)
        for (int64_t g = 0; g < groups; g++) {
            const int64_t at = r * groups + g, first = g * group;
            const int64_t some = matrix->inputs - first < group ? matrix->inputs - first : group;
            int8_t *coarse = to->numbers + 2 * group * (g * to->rows + r), *fine = coarse + group;
            const float *own = x + first;
            float values[MOST_GROUP];
            if (matrix->order || some < group) {
                for (int64_t i = 0; i < some; i++) values[i] = matrix->order ? x[matrix->order[first + i]] : own[i];
                for (int64_t i = some; i < group; i++) values[i] = 0.0f;
                own = values;
            }
            const float most = largest_of(own, group), step = most / LARGEST, factor = step > 0.0f ? 1.0f / step : 0.0f;
            if (most < INFINITY && factor < INFINITY) {
                to->whole[at] = split_integers(own, group, factor, coarse, fine);
                to->steps[at] = step;
            } else { /* zeros instead of numbers near the smallest one; infinity or NaN has no integers: all sums are NaN */
                memset(coarse, 0, (size_t)group), memset(fine, 0, (size_t)group);
                to->whole[at] = 0, to->steps[at] = most < INFINITY ? 0.0f : NAN;
            }
            to->sums[at] = (float)to->whole[at] * to->steps[at];
        }
}

/* --- vectors ---------------------------------------------------------------------------------- */

#if HAS_VNNI
#define MOST_SUMS 4 /* most rows times blocks: their sums fit the registers */
#define EACH_SIZE(DO) DO(1, 1) DO(2, 1) DO(3, 1) DO(4, 1) DO(1, 2) DO(1, 4)

/* Add the products of four inputs and weights of each output. Written as assembly because GCC 12 copies every sum of the
   intrinsic from register to register. */
#define ADD_PRODUCTS(SUM, WEIGHTS, FOUR) __asm__("vpdpbusd %2, %1, %0" : "+v"(SUM) : "v"(WEIGHTS), "v"(FOUR))

INLINE __m512i four_inputs(const int8_t *from)
{
    int32_t four;
    memcpy(&four, from, sizeof four);
    return _mm512_set1_epi32(four);
}

/* Add the products of four inputs of each row with a vector of outputs: `x` [rows, 2, group], `sum` [rows][2][2], coarse and fine. */
INLINE void add_four(const int8_t *x, int64_t group, const int rows, const int half, __m512i weights, __m512i sum[][2][2])
{
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        ADD_PRODUCTS(sum[r][half][0], weights, four_inputs(x + 2 * r * group));
        ADD_PRODUCTS(sum[r][half][1], weights, four_inputs(x + (2 * r + 1) * group));
    }
}

/* Multiply `rows` rows from `first` on with `blocks` neighbouring blocks, and apply the operations after the product. */
INLINE void multiply_rows(const Matrix *matrix, const SplitGroups *input, const Output *output, int64_t block, int64_t row,
                          int64_t first, const int64_t kind, const int rows, const int blocks)
{
    const int64_t group = matrix->group, groups = groups_of(matrix), bytes = group_bytes(matrix);
    const int64_t of_block = groups * bytes, before = head_bytes(matrix), stride = 2 * LINE;
    const int inputs = kind == GROUPS4_TILES ? WORD : WORD / 2; /* of a line */
    const char *at = group_at(matrix, block, 0);
    const __m512i low = _mm512_set1_epi8(0xf), unsign = _mm512_set1_epi8((char)EXCESS);
    Vector total[MOST_SUMS][2];
#pragma GCC unroll 4
    for (int s = 0; s < rows * blocks; s++) total[s][0] = total[s][1] = (Vector){0};
    for (int64_t g = 0; g < groups; g++, at += bytes) {
        const int8_t *x = input->numbers + 2 * group * (g * input->rows + first);
        const char *from = at + before;
        /* where a block ends, the next ones that are read together begin */
        const int64_t ahead = AHEAD + (g * bytes + AHEAD >= of_block ? (blocks - 1) * of_block : 0);
        __m512i sum[MOST_SUMS][2][2];
#pragma GCC unroll 4
        for (int s = 0; s < rows * blocks; s++)
            sum[s][0][0] = sum[s][0][1] = sum[s][1][0] = sum[s][1][1] = _mm512_setzero_si512();
        for (int64_t i = 0; i < group; i += inputs, from += stride, x += inputs)
#pragma GCC unroll 4
            for (int b = 0; b < blocks; b++)
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    const char *line = from + b * of_block + half * LINE;
                    __builtin_prefetch(line + ahead, 0, 3);
                    const __m512i values = _mm512_loadu_si512(line);
                    if (kind == GROUPS4_TILES) {
                        add_four(x, group, rows, half, _mm512_and_si512(values, low), sum + b * rows);
                        add_four(x + WORD / 2, group, rows, half, _mm512_and_si512(_mm512_srli_epi32(values, 4), low), sum + b * rows);
                    } else {
                        add_four(x, group, rows, half, _mm512_xor_si512(values, unsign), sum + b * rows);
                    }
                }
#pragma GCC unroll 4
        for (int b = 0; b < blocks; b++) {
            const Head head = head_of(matrix, at + b * of_block);
            for (int64_t line = 0; line < before; line += LINE) __builtin_prefetch(at + b * of_block + ahead + line, 0, 3);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                const int64_t own = (first + r) * groups + g;
                const __m512i excess = _mm512_set1_epi32(kind == GROUPS4_TILES ? 0 : EXCESS * input->whole[own]);
                __m512i whole[2];
                for (int half = 0; half < 2; half++) {
                    __m512i *parts = sum[b * rows + r][half];
                    whole[half] = _mm512_add_epi32(_mm512_slli_epi32(parts[0], COARSE_BITS), parts[1]);
                    if (kind != GROUPS4_TILES) whole[half] = _mm512_sub_epi32(whole[half], excess);
                }
                apply_integers(&head, matrix->offset, input->steps[own], input->sums[own], (Words)whole[0], (Words)whole[1],
                               total[b * rows + r]);
            }
        }
    }
    Vector done[MOST_SUMS][2]; /* a copy, so that the sums themselves stay in registers */
#pragma GCC unroll 4
    for (int s = 0; s < rows * blocks; s++) done[s][0] = total[s][0], done[s][1] = total[s][1];
#pragma GCC unroll 1
    for (int s = 0; s < rows * blocks; s++)
        finish(matrix, output, block + s / rows, row + first + s % rows, done[s][0], done[s][1]);
}

typedef void RowsFunction(const Matrix *matrix, const SplitGroups *input, const Output *output, int64_t block, int64_t row,
                          int64_t first);

#define DEFINE(KIND, SIZE, BLOCKS)                                                                                     \
    static void multiply_##KIND##_##SIZE##_##BLOCKS(const Matrix *matrix, const SplitGroups *input,                    \
                                                    const Output *output, int64_t block, int64_t row, int64_t first)   \
    {                                                                                                                  \
        multiply_rows(matrix, input, output, block, row, first, KIND, SIZE, BLOCKS);                                   \
    }
#define DEFINE_KINDS(SIZE, BLOCKS) DEFINE(GROUPS4_TILES, SIZE, BLOCKS) DEFINE(GROUPS8_TILES, SIZE, BLOCKS)
EACH_SIZE(DEFINE_KINDS)

#define FUNCTIONS(SIZE, BLOCKS) {multiply_GROUPS4_TILES_##SIZE##_##BLOCKS, multiply_GROUPS8_TILES_##SIZE##_##BLOCKS},
static RowsFunction *const functions[][2] = {EACH_SIZE(FUNCTIONS)};
#define TOGETHER 5 /* the function for one row that reads BLOCKS blocks, since one block alone would wait for its sums */
#define BLOCKS 4

/* Multiply rows with a block, or one row with as many of `most` blocks as are read together. Returns their number. */
static int64_t multiply_on_vectors(const Matrix *matrix, const SplitGroups *input, const Output *output, int64_t block,
                                   int64_t row, int64_t rows, int64_t most)
{
    const int64_t kind = matrix->kind - GROUPS4_TILES, parts = (rows + MOST_SUMS - 1) / MOST_SUMS;
    if (rows == 1 && most >= BLOCKS) {
        functions[TOGETHER][kind](matrix, input, output, block, row, 0);
        return BLOCKS;
    }
    for (int64_t part = 0; part < parts; part++) { /* parts of rows whose sizes differ by at most one */
        const int64_t first = rows * part / parts, size = rows * (part + 1) / parts - first;
        functions[size - 1][kind](matrix, input, output, block, row, first);
    }
    return 1;
}
#endif

/* --- a thread's share --------------------------------------------------------------------------- */

static int64_t multiply_blocks(const Matrix *matrix, const SplitGroups *input, const Output *output, int64_t block, int64_t row,
                               int64_t rows, int64_t most)
{
#if HAS_VNNI
    const int on_tiles = pilotfish_has_tiles() && (rows >= ON_TILES || rows == LEAST_ROWS);
    if (!on_tiles) return multiply_on_vectors(matrix, input, output, block, row, rows, most);
#else
    (void)most;
#endif
    pilotfish_multiply_groups_on_tiles(matrix, input, output, block, row, rows);
    return 1;
}

/* Each thread splits the rows of a chunk for itself. */
void pilotfish_multiply_split_groups(const Matrix *matrix, const float *input, const Output *output, int64_t rows, int64_t team)
{
    const int64_t groups = groups_of(matrix), width = groups * matrix->group, fitting = CHUNK / (2 * width);
    const int64_t bounded = fitting < MOST_ROWS ? fitting : MOST_ROWS, most = bounded > LEAST_ROWS ? bounded : LEAST_ROWS;
    const int64_t chunks = (rows + most - 1) / most, size = (rows + chunks - 1) / chunks;
    const int64_t items = chunks * matrix->blocks, thread = omp_get_thread_num(), end = items * (thread + 1) / team;
    int8_t numbers[2 * size * width] __attribute__((aligned(LINE)));
    int32_t whole[size * groups];
    float steps[size * groups], sums[size * groups];
    SplitGroups split = {0, numbers, whole, steps, sums};
    for (int64_t item = items * thread / team, known = -1, blocks = 1; item < end; item += blocks) {
        const int64_t chunk = item / matrix->blocks, block = item % matrix->blocks;
        const int64_t row = rows * chunk / chunks, some = rows * (chunk + 1) / chunks - row;
        const int64_t left = end - item < matrix->blocks - block ? end - item : matrix->blocks - block;
        split.rows = some;
        if (chunk != known) split_rows(matrix, input + row * matrix->inputs, &split);
        known = chunk;
        blocks = multiply_blocks(matrix, &split, output, block, row, some, left);
    }
    pilotfish_leave_tiles();
}
