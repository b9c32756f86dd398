/* Products of int8 weights with activations that are split into int8 numbers.

   One number of 8 bits is too coarse for an activation, so it is the sum of two. Sums of integers are exact, so tile
   registers (tiles.c) and vectors give the same bits, whatever the number of rows.

   VNNI multiplies unsigned bytes with signed ones, four of each for every sum. The weights become unsigned by adding 128;
   what that adds to a sum, 128 times the sum of the activations, is subtracted at the end. */

#include <stddef.h>

#include "finish.h"
#include "tiles.h"

#define MOST_SPLIT 8192    /* inputs of an INT8_TILES matrix: rows are split on the stack */
#define INT8_INPUTS 64     /* their number is a multiple of it: those of a tile register's row */
#define AHEAD 8192         /* bytes of weights to prefetch */
#define EXCESS 128         /* what makes weights unsigned */

int pilotfish_splits_rows(int64_t inputs)
{
    return (pilotfish_has_tiles() || HAS_VNNI) && inputs % INT8_INPUTS == 0 && inputs <= MOST_SPLIT;
}

void pilotfish_split_rows(const float *x, int64_t rows, int64_t inputs, const SplitRows *to)
{
    for (int64_t r = 0; r < rows; r++, x += inputs) {
        int8_t *coarse = to->numbers + 2 * r * inputs, *fine = coarse + inputs;
        int32_t sums[2] = {0, 0};
        uint32_t bits, largest = 0; /* of the absolute values, whose bits are in the order of the values */
        for (int64_t i = 0; i < inputs; i++) {
            memcpy(&bits, x + i, sizeof bits);
            bits &= 0x7fffffffu;
            largest = bits > largest ? bits : largest;
        }
        to->excess[2 * r] = to->excess[2 * r + 1] = 0;
        if (largest >= 0x7f800000u) { /* infinity or NaN has no integers: all sums of the row are NaN */
            memset(coarse, 0, 2 * (size_t)inputs);
            to->steps[r] = NAN;
            continue;
        }
        float most;
        memcpy(&most, &largest, sizeof most);
        const float step = most / 127.0f, factor = step > 0.0f ? 1.0f / step : 0.0f;
        to->steps[r] = factor < INFINITY ? step : 0.0f;
        for (int64_t i = 0; i < inputs; i++) {
            const float value = factor < INFINITY ? x[i] * factor : 0.0f, whole = rintf(value);
            const int32_t first = (int32_t)whole, second = (int32_t)rintf((value - whole) * FINE);
            coarse[i] = (int8_t)first, fine[i] = (int8_t)second;
            sums[0] += first, sums[1] += second;
        }
        to->excess[2 * r] = EXCESS * sums[0], to->excess[2 * r + 1] = EXCESS * sums[1];
    }
}

#if HAS_VNNI
#define ROWS 6 /* most rows of a group: their sums and a step's weights fit the registers */
#define EACH_SIZE(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)

/* The sums of one row and one vector of outputs. */
INLINE Vector joined(__m512i coarse, __m512i fine, const int32_t *excess, float step)
{
    const Vector whole = (Vector)_mm512_cvtepi32_ps(_mm512_sub_epi32(coarse, _mm512_set1_epi32(excess[0])));
    const Vector part = (Vector)_mm512_cvtepi32_ps(_mm512_sub_epi32(fine, _mm512_set1_epi32(excess[1])));
    return (whole + part / FINE) * step;
}

/* Add the products of four inputs and weights of each output. Written as assembly because GCC 12 copies every sum of the
   intrinsic from register to register. */
#define ADD_PRODUCTS(SUM, WEIGHTS, FOUR) __asm__("vpdpbusd %2, %1, %0" : "+v"(SUM) : "v"(WEIGHTS), "v"(FOUR))

/* Multiply `rows` rows from `first` on with a block's weights, and apply the operations after the product. */
INLINE void multiply_rows(const Matrix *matrix, const SplitRows *input, const Output *output, int64_t block, int64_t row,
                          int64_t first, const int rows)
{
    const int64_t inputs = matrix->inputs;
    const int8_t *weights = (const int8_t *)matrix->weights + block * inputs * COLUMNS;
    const int8_t *x = input->numbers + 2 * first * inputs;
    const __m512i unsign = _mm512_set1_epi8((char)EXCESS);
    __m512i sum[ROWS][2][2]; /* [row, coarse and fine, vector of outputs] */
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        sum[r][0][0] = sum[r][0][1] = _mm512_setzero_si512();
        sum[r][1][0] = sum[r][1][1] = _mm512_setzero_si512();
    }
    for (int64_t k = 0; k < inputs; k += 4, weights += 4 * COLUMNS) {
        __builtin_prefetch(weights + AHEAD, 0, 3);
        __builtin_prefetch(weights + AHEAD + LINE, 0, 3);
        const __m512i left = _mm512_xor_si512(_mm512_loadu_si512(weights), unsign);
        const __m512i right = _mm512_xor_si512(_mm512_loadu_si512(weights + LINE), unsign);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) {
                int32_t inputs_of_row;
                memcpy(&inputs_of_row, x + (2 * r + part) * inputs + k, sizeof inputs_of_row);
                const __m512i four = _mm512_set1_epi32(inputs_of_row);
                ADD_PRODUCTS(sum[r][part][0], left, four);
                ADD_PRODUCTS(sum[r][part][1], right, four);
            }
        }
    }
    float sums[ROWS * COLUMNS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
            *(Vector *)(sums + r * COLUMNS + half * LANES) =
                joined(sum[r][0][half], sum[r][1][half], input->excess + 2 * (first + r), input->steps[first + r]);
    pilotfish_finish(matrix, output, block, row + first, sums, rows);
}

typedef void RowsFunction(const Matrix *matrix, const SplitRows *input, const Output *output, int64_t block, int64_t row,
                          int64_t first);

#define DEFINE(SIZE)                                                                                                   \
    static void multiply_##SIZE(const Matrix *matrix, const SplitRows *input, const Output *output, int64_t block,     \
                                int64_t row, int64_t first)                                                            \
    {                                                                                                                  \
        multiply_rows(matrix, input, output, block, row, first, SIZE);                                                 \
    }
EACH_SIZE(DEFINE)

#define FUNCTION(SIZE) multiply_##SIZE,
static RowsFunction *const functions[ROWS] = {EACH_SIZE(FUNCTION)};

/* Groups of rows whose sizes differ by at most one. */
static void multiply_on_vectors(const Matrix *matrix, const SplitRows *input, const Output *output, int64_t block,
                                int64_t row, int64_t rows)
{
    const int64_t groups = (rows + ROWS - 1) / ROWS;
    for (int64_t group = 0; group < groups; group++) {
        const int64_t first = rows * group / groups, size = rows * (group + 1) / groups - first;
        functions[size - 1](matrix, input, output, block, row, first);
    }
}
#endif

void pilotfish_multiply_split(const Matrix *matrix, const SplitRows *input, const Output *output, int64_t block, int64_t row,
                              int64_t rows)
{
#if HAS_VNNI
    if (!pilotfish_has_tiles()) {
        multiply_on_vectors(matrix, input, output, block, row, rows);
        return;
    }
#endif
    pilotfish_multiply_split_on_tiles(matrix, input, output, block, row, rows);
}
