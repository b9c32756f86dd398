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

/* Whether a lane of `x` is at least `least`. A lane that is no number is not. */
INLINE int reaches(Vector x, float least)
{
#if defined(IS_AVX512)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(least), _CMP_GE_OQ) != 0;
#else
    uint32_t found = 0;
    for (int l = 0; l < LANES; l++) found |= x[l] >= least;
    return (int)found;
#endif
}

static void insert(float value, int64_t count, float *best)
{
    for (int64_t l = 0; l < count; l++) {
        const float other = best[l];
        if (value > other) best[l] = value, value = other;
    }
}

/* The largest lower bounds of `count` logits, descending. A logit that is no number has no bounds: it is nobody's leader. */
static void find_lower(const float *logits, const float *error, float norm, int64_t count, int64_t leaders, float *best)
{
    for (int64_t l = 0; l < leaders; l++) best[l] = -INFINITY;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Vector lower = *(const Vector *)(logits + i) - *(const Vector *)(error + i) * norm;
        if (!reaches(lower, best[leaders - 1])) continue;
        for (int l = 0; l < LANES; l++) insert(lower[l], leaders, best);
    }
    for (; i < count; i++) insert(logits[i] - error[i] * norm, leaders, best);
}

/* A value that at least `leaders` logits of the row reach. */
static float least_leader(const Leading *leading, int64_t row)
{
    const float *lower = leading->lower + row * PARTS * MOST_LEADERS;
    float best[MOST_LEADERS]; /* descending */
    for (int64_t l = 0; l < leading->leaders; l++) best[l] = -INFINITY;
    for (int64_t part = 0; part < PARTS; part++)
        for (int64_t l = 0; l < leading->leaders; l++) insert(lower[part * MOST_LEADERS + l], leading->leaders, best);
    return best[leading->leaders - 1];
}

/* Whether one of `count` upper bounds reaches `least`; true where too few logits have bounds. */
INLINE int may_lead(const float *logits, const float *error, float norm, int64_t count, float least)
{
    if (least == -INFINITY) return 1;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        if (reaches(*(const Vector *)(logits + i) + *(const Vector *)(error + i) * norm, least)) return 1;
    for (; i < count; i++)
        if (logits[i] + error[i] * norm >= least) return 1;
    return 0;
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
    for (int64_t item = 0; item < rows * PARTS; item++) {
        const int64_t row = item / PARTS, from = outputs * (item % PARTS) / PARTS, end = outputs * (item % PARTS + 1) / PARTS;
        find_lower(logits + row * outputs + from, screen->error + from, leading->norms[row], end - from, leading->leaders,
                   leading->lower + item * MOST_LEADERS);
    }
    pilotfish_wait_for_all(barrier);
    float least[rows];
    for (int64_t row = 0; row < rows; row++) least[row] = least_leader(leading, row);
#pragma omp for schedule(static) nowait
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t at = block * COLUMNS, left = outputs - at, count = left < COLUMNS ? left : COLUMNS;
        int is_wanted = 0;
        for (int64_t row = 0; row < rows; row++) {
            float *of_block = logits + row * outputs + at;
            if (!is_wanted) is_wanted = may_lead(of_block, screen->error + at, leading->norms[row], count, least[row]);
            for (int64_t c = 0; c < count; c++) of_block[c] = -INFINITY;
        }
        leading->wanted[block] = is_wanted;
    }
    pilotfish_wait_for_all(barrier);
    if (omp_get_thread_num() == 0) {
        leading->count = 0;
        for (int64_t block = 0; block < blocks; block++)
            if (leading->wanted[block]) leading->wanted[leading->count++] = (int32_t)block;
    }
    pilotfish_wait_for_all(barrier);
    pilotfish_multiply_blocks(head, input, &whole, rows, leading->wanted, leading->count, barrier);
}
