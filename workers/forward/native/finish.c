/* The operations after a product whose sums lie in memory. */

#include "finish.h"

void pilotfish_finish(const Matrix *matrix, const Output *output, int64_t block, int64_t row, const float *sums, int64_t rows)
{
    for (int64_t r = 0; r < rows; r++, sums += COLUMNS)
        finish(matrix, output, block, row + r, *(const Vector *)sums, *(const Vector *)(sums + LANES));
}
