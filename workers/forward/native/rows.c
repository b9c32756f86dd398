/* A row of a packed matrix, unpacked: a head that is tied to the embedding serves as its table. */

#include "products.h"

void pilotfish_row(const Matrix *matrix, int64_t id, float *to)
{
    const int64_t inputs = matrix->inputs, block = id / COLUMNS * inputs * COLUMNS, column = id % COLUMNS;
    if (matrix->kind == BFLOAT16) {
        const uint16_t *pairs = (const uint16_t *)matrix->weights + block;
        for (int64_t i = 0; i < inputs; i++) to[i] = widen_bfloat16(pairs[(i / 2 * COLUMNS + column) * 2 + i % 2]);
    } else {
        const float *values = (const float *)matrix->weights + block;
        for (int64_t i = 0; i < inputs; i++) to[i] = values[i * COLUMNS + column];
    }
}
