/* The leading logits of a head, without reading all of it.

   A greedy decision needs the largest logit alone, but reading the head takes most of a small model's step. So a form of
   the head in INT8, a quarter as large, bounds every logit from below and above. Only blocks in which an upper bound
   reaches the lower bounds of the leaders are computed, with the same functions as the whole head. So every logit that
   is computed has the bits that it has without the screen, and the leaders are among them. */

#include <omp.h>
#include <stddef.h>

#include "leading.h"

static float norm_of(const float *x, int64_t count)
{
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) sum += (double)x[i] * x[i];
    return (float)(sqrt(sum) * 1.001) + 1.0f;
}

/* A logit that is no number has no bounds: it is nobody's leader. */
static void bound_block(const Screen *screen, const float *logits, const Leading *leading, int64_t rows, int64_t row, int64_t block)
{
    const int64_t blocks = screen->matrix.blocks, at = block * COLUMNS, left = screen->matrix.outputs - at;
    const float *of_block = logits + row * screen->matrix.outputs + at, *error = screen->error + at;
    const float norm = leading->norms[row];
    float lower = -INFINITY, upper = -INFINITY;
    for (int64_t c = 0; c < (left < COLUMNS ? left : COLUMNS); c++) {
        const float low = of_block[c] - error[c] * norm, high = of_block[c] + error[c] * norm;
        lower = low > lower ? low : lower;
        upper = high > upper ? high : upper;
    }
    leading->bounds[row * blocks + block] = lower;
    leading->bounds[(rows + row) * blocks + block] = upper;
}

/* A value that at least `leaders` logits of the row reach. */
static float least_leader(const Leading *leading, int64_t blocks, int64_t row)
{
    float best[MOST_LEADERS]; /* descending; each block has one logit of at least its lower bound */
    for (int64_t l = 0; l < leading->leaders; l++) best[l] = -INFINITY;
    for (int64_t block = 0; block < blocks; block++) {
        float value = leading->bounds[row * blocks + block];
        for (int64_t l = 0; l < leading->leaders; l++) {
            const float other = best[l];
            if (value > other) best[l] = value, value = other;
        }
    }
    return best[leading->leaders - 1];
}

static void list_wanted(Leading *leading, int64_t blocks, int64_t rows)
{
    float least[rows];
    for (int64_t row = 0; row < rows; row++) least[row] = least_leader(leading, blocks, row);
    leading->count = 0;
    for (int64_t block = 0; block < blocks; block++) {
        int is_wanted = 0;
        for (int64_t row = 0; row < rows; row++) is_wanted |= leading->bounds[(rows + row) * blocks + block] >= least[row];
        if (is_wanted) leading->wanted[leading->count++] = (int32_t)block;
    }
}

void pilotfish_multiply_leading(const Matrix *head, const Screen *screen, const float *input, float *logits, int64_t rows,
                                Leading *leading, Barrier *barrier)
{
    const int64_t inputs = head->inputs, outputs = head->outputs, blocks = head->blocks;
    const Output whole = {STORE, logits, NULL, outputs, FLOAT32};
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < rows; row++) leading->norms[row] = norm_of(input + row * inputs, inputs);
    pilotfish_multiply(&screen->matrix, input, &whole, rows, barrier);
#pragma omp for schedule(static) nowait
    for (int64_t item = 0; item < rows * blocks; item++) bound_block(screen, logits, leading, rows, item / blocks, item % blocks);
    pilotfish_wait_for_all(barrier);
    if (omp_get_thread_num() == 0) list_wanted(leading, blocks, rows);
#pragma omp for schedule(static) nowait
    for (int64_t at = 0; at < rows * outputs; at++) logits[at] = -INFINITY;
    pilotfish_wait_for_all(barrier);
    pilotfish_multiply_blocks(head, input, &whole, rows, leading->wanted, leading->count, barrier);
}
