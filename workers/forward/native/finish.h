/* The operations after a product: scales, the bias, and what the output says. They lie below all products. */

#ifndef PILOTFISH_FINISH_H
#define PILOTFISH_FINISH_H

#include "products.h"

/* Apply the operations after a product to one row of a block. */
INLINE void finish(const Matrix *matrix, const Output *output, int64_t block, int64_t row, Vector first, Vector second)
{
    const int64_t at = block * COLUMNS;
    if (matrix->scale) {
        first *= *(const Vector *)(matrix->scale + at);
        second *= *(const Vector *)(matrix->scale + at + LANES);
    }
    if (matrix->bias) {
        first += *(const Vector *)(matrix->bias + at);
        second += *(const Vector *)(matrix->bias + at + LANES);
    }
    if (output->after == GATE) {
        const Vector gated = sigmoid_weighted(first) * second;
        const int64_t from = at / 2, left = output->width - from, to = row * output->width + from;
        if (left >= LANES && output->kind == BFLOAT16) *(Halves *)((uint16_t *)output->input + to) = narrow_bfloat16s(gated);
        else if (left >= LANES) *(Vector *)((float *)output->input + to) = gated;
        else if (left > 0) {
            float value[LANES];
            memcpy(value, &gated, sizeof gated);
            put(output->input, output->kind, to, value, left);
        }
        return;
    }
    const int64_t left = matrix->outputs - at;
    if (output->after == ROUND) {
        uint16_t *to = (uint16_t *)output->input + row * output->width + at;
        const Halves halves[2] = {narrow_bfloat16s(first), narrow_bfloat16s(second)};
        memcpy(to, halves, (left < COLUMNS ? left : COLUMNS) * sizeof *to);
        return;
    }
    float *to = output->to + row * output->width + at;
    if (left >= COLUMNS) {
        if (output->after == ADD) {
            first += *(const Vector *)to;
            second += *(const Vector *)(to + LANES);
        }
        *(Vector *)to = first;
        *(Vector *)(to + LANES) = second;
        return;
    }
    float value[COLUMNS];
    memcpy(value, &first, sizeof first);
    memcpy(value + LANES, &second, sizeof second);
    for (int64_t c = 0; c < left; c++) to[c] = output->after == ADD ? to[c] + value[c] : value[c];
}

/* The same for `rows` rows of a block: sums are [rows, COLUMNS]. */
void pilotfish_finish(const Matrix *matrix, const Output *output, int64_t block, int64_t row, const float *sums, int64_t rows);

#endif
