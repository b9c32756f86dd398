/* The largest values of rows, and the logarithm of the sum of all exponentials of a row. */

#include <stddef.h>

#include "largest.h"
#include "products.h"

#define HIGHEST 1e30f /* replaces infinity, so that differences are numbers */

/* NaN counts as minus infinity. */
INLINE float cleaned(float value)
{
    return value != value ? -INFINITY : value < HIGHEST ? value : HIGHEST;
}

/* Insert a value behind those that are not smaller. */
static void insert(float value, int64_t column, int64_t count, float *best, int64_t *columns)
{
    int64_t at = count - 1;
    for (; at > 0 && best[at - 1] < value; at--) best[at] = best[at - 1], columns[at] = columns[at - 1];
    best[at] = value, columns[at] = column;
}

void pilotfish_largest_of_row(const float *values, int64_t size, int64_t count, float *best, int64_t *columns, float *total)
{
    for (int64_t i = 0; i < count; i++) best[i] = -INFINITY, columns[i] = i;
    for (int64_t first = 0; first < size; first += 2 * LANES) {
        const int64_t some = size - first < 2 * LANES ? size - first : 2 * LANES;
        int is_any = 0;
        if (some == 2 * LANES)
            for (int l = 0; l < 2 * LANES; l++) is_any |= values[first + l] > best[count - 1];
        else is_any = 1;
        if (!is_any) continue;
        for (int64_t l = 0; l < some; l++) {
            const float value = cleaned(values[first + l]);
            if (value > best[count - 1]) insert(value, first + l, count, best, columns);
        }
    }
    if (best[0] == -INFINITY) {
        *total = 0.0f;
        return;
    }
    float lanes[LANES] = {0}, sum = 0.0f;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] += exponential(cleaned(values[i + l]) - best[0]);
    for (int l = 0; l < LANES; l++) sum += lanes[l];
    for (; i < size; i++) sum += exponential(cleaned(values[i]) - best[0]);
    *total = best[0] + logf(sum);
}

/* values [rows, size] → the `count` <= size largest of each row, the largest first and of equal ones the first, their
   columns, and the logarithms of the sums [rows]. Columns of minus infinity may repeat. */
void pilotfish_largest(const float *values, int64_t rows, int64_t size, int64_t count, float *best, int64_t *columns, float *totals)
{
#pragma omp parallel for schedule(static) if (rows > 1)
    for (int64_t row = 0; row < rows; row++)
        pilotfish_largest_of_row(values + row * size, size, count, best + row * count, columns + row * count, totals + row);
}
