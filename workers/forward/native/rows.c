/* Rows of a packed matrix, unpacked: a head that is tied to the embedding serves as its table. */

#include "products.h"

#define FEWEST_SHARED 8 /* rows that are worth the start of a parallel region */

/* Write the rows `ids` of a packed FLOAT32 or BFLOAT16 matrix to `to` [count, inputs]. */
void pilotfish_rows(const Matrix *matrix, const int64_t *ids, int64_t count, float *to)
{
    const int64_t inputs = matrix->inputs;
#pragma omp parallel for schedule(static) if (count > FEWEST_SHARED)
    for (int64_t r = 0; r < count; r++) {
        const int64_t block = ids[r] / COLUMNS * inputs * COLUMNS, column = ids[r] % COLUMNS;
        float *row = to + r * inputs;
        if (matrix->kind == BFLOAT16) {
            const uint16_t *pairs = (const uint16_t *)matrix->weights + block;
            for (int64_t i = 0; i < inputs; i++)
                row[i] = widen_bfloat16(pairs[(i / 2 * COLUMNS + column) * 2 + i % 2]);
        } else {
            const float *values = (const float *)matrix->weights + block;
            for (int64_t i = 0; i < inputs; i++) row[i] = values[i * COLUMNS + column];
        }
    }
}
