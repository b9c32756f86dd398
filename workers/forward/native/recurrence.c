/* Recurrences over slots of states: causal convolution, gated delta rule, state space model. The tokens of a row are computed
   one after another in a fixed order, whatever tokens are in the step, so no chunk and no neighbor changes a bit. Parts of a
   state that do not meet in a sum are computed on different threads. */

#include <stddef.h>

#include "numbers.h"

#define COLUMNS (4 * LANES) /* values of a head whose columns of the state are computed together */
#define LINES 16            /* channels of a state space model that are computed together */

/* See RecurrencePlan in workers/forward/recurrence/plan.py. */
typedef struct {
    int64_t rows;
    const int32_t *row_starts, *source, *target;
} Plan;

INLINE int64_t less(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* The first `count` <= LANES of these numbers, then zeros. */
INLINE Vector first_of(const float *from, int64_t count)
{
    Vector some = {0};
    if (count == LANES) return *(const Vector *)from;
    memcpy(&some, from, (size_t)count * sizeof *from);
    return some;
}

INLINE void copy_rows(float *to, int64_t to_stride, const float *from, int64_t from_stride, int64_t rows, int64_t width)
{
    for (int64_t r = 0; r < rows; r++) memcpy(to + r * to_stride, from + r * from_stride, (size_t)width * sizeof *to);
}

/* inputs, output [tokens, channels]; weight [channels, width]; bias [channels] or NULL; states of `kind` [slots, channels, kept]
   with the last `kept` >= width - 1 inputs. */
void pilotfish_convolution(const Plan *plan, const int64_t *sizes, const void *const *given, void *states, float *output)
{
    const int64_t channels = sizes[0], width = sizes[1], kept = sizes[2], kind = sizes[3], is_silu = sizes[4];
    const float *inputs = given[0], *weight = given[1], *bias = given[2];
    const int64_t blocks = (channels + LANES - 1) / LANES;
#pragma omp parallel for collapse(2) schedule(dynamic, 4)
    for (int64_t row = 0; row < plan->rows; row++)
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t first = block * LANES, count = less(LANES, channels - first);
            float factors[width][LANES], window[kept + 1][LANES];
            memset(factors, 0, sizeof factors), memset(window, 0, sizeof window);
            for (int64_t l = 0; l < count; l++)
                for (int64_t i = 0; i < width; i++) factors[i][l] = weight[(first + l) * width + i];
            for (int64_t t = plan->row_starts[row]; t < plan->row_starts[row + 1]; t++) {
                const int64_t source = plan->source[t], target = plan->target[t];
                if (source >= 0)
                    for (int64_t l = 0; l < count; l++)
                        for (int64_t i = 0; i < kept; i++) {
                            const int64_t at = (source * channels + first + l) * kept + i;
                            window[i + 1][l] = kind == BFLOAT16 ? widen_bfloat16(((uint16_t *)states)[at]) : ((float *)states)[at];
                        }
                for (int64_t i = 0; i < kept; i++) memcpy(window[i], window[i + 1], sizeof *window);
                *(Vector *)window[kept] = first_of(inputs + t * channels + first, count);
                Vector sum = bias ? first_of(bias + first, count) : (Vector){0};
                for (int64_t i = 0; i < width; i++)
                    sum = fused(*(Vector *)factors[i], *(Vector *)window[kept + 1 - width + i], sum);
                if (is_silu) sum = sigmoid_weighted(sum);
                memcpy(output + t * channels + first, &sum, (size_t)count * sizeof *output);
                if (target < 0) continue;
                for (int64_t l = 0; l < count; l++) {
                    float last[kept];
                    for (int64_t i = 0; i < kept; i++) last[i] = window[i + 1][l];
                    put(states, kind, (target * channels + first + l) * kept, last, kept);
                }
            }
        }
}

/* One token: the state is `keys` rows of COLUMNS values. */
INLINE void advance_delta(float (*state)[COLUMNS], int64_t keys, const float *query, const float *key, const float *gate, Vector *values)
{
    const Vector decay = same(gate[0]);
    Vector stored[4] = {{0}}, found[4] = {{0}};
    for (int64_t i = 0; i < keys; i++)
        for (int c = 0; c < 4; c++) {
            Vector *at = (Vector *)state[i] + c;
            *at *= decay;
            stored[c] = fused(*at, same(key[i]), stored[c]);
        }
    for (int c = 0; c < 4; c++) values[c] = (values[c] - stored[c]) * gate[1];
    for (int64_t i = 0; i < keys; i++)
        for (int c = 0; c < 4; c++) {
            Vector *at = (Vector *)state[i] + c;
            *at = fused(values[c], same(key[i]), *at);
            found[c] = fused(*at, same(query[i]), found[c]);
        }
    memcpy(values, found, sizeof found);
}

/* query, key [tokens, heads, keys]; value, output [tokens, heads, values]; log_decay <= 0 and beta [tokens, heads];
   states [slots, heads, keys, values]. */
void pilotfish_gated_delta_rule(const Plan *plan, const int64_t *sizes, const void *const *given, float *states, float *output)
{
    const int64_t heads = sizes[0], keys = sizes[1], size = sizes[2], blocks = (size + COLUMNS - 1) / COLUMNS;
    const float *query = given[0], *key = given[1], *value = given[2], *log_decay = given[3], *beta = given[4];
#pragma omp parallel for collapse(3) schedule(dynamic)
    for (int64_t row = 0; row < plan->rows; row++)
        for (int64_t head = 0; head < heads; head++)
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t first = block * COLUMNS, count = less(COLUMNS, size - first);
                float state[keys][COLUMNS];
                memset(state, 0, sizeof state);
                for (int64_t t = plan->row_starts[row]; t < plan->row_starts[row + 1]; t++) {
                    const int64_t at = t * heads + head, source = plan->source[t], target = plan->target[t];
                    float *slot = states + (source * heads + head) * keys * size + first;
                    if (source >= 0) copy_rows(*state, COLUMNS, slot, size, keys, count);
                    Vector values[4] = {{0}};
                    memcpy(values, value + at * size + first, (size_t)count * sizeof *value);
                    const float gate[2] = {exponential(log_decay[at]), beta[at]};
                    advance_delta(state, keys, query + at * keys, key + at * keys, gate, values);
                    memcpy(output + at * size + first, values, (size_t)count * sizeof *output);
                    slot = states + (target * heads + head) * keys * size + first;
                    if (target >= 0) copy_rows(slot, size, *state, COLUMNS, keys, count);
                }
            }
}

/* The sum of all lanes. */
INLINE float total(Vector sum)
{
    float lanes[LANES];
    memcpy(lanes, &sum, sizeof lanes);
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

/* inputs, output [tokens, heads, channels]; steps [tokens, heads]; a [heads], or [heads, size] with `own`; b, c [tokens, groups,
   size]; d [heads]; states [slots, heads, channels, size]. A line is one channel of a head. */
void pilotfish_state_space(const Plan *plan, const int64_t *sizes, const void *const *given, float *states, float *output)
{
    const int64_t heads = sizes[0], channels = sizes[1], groups = sizes[2], size = sizes[3], own = sizes[4];
    const int64_t lines = heads * channels, blocks = (lines + LINES - 1) / LINES, vectors = (size + LANES - 1) / LANES;
    const float *inputs = given[0], *steps = given[1], *a = given[2], *b = given[3], *c = given[4], *d = given[5];
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t row = 0; row < plan->rows; row++)
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t first = block * LINES, count = less(LINES, lines - first);
            float state[LINES][vectors * LANES];
            memset(state, 0, sizeof state);
            for (int64_t t = plan->row_starts[row]; t < plan->row_starts[row + 1]; t++) {
                const int64_t source = plan->source[t], target = plan->target[t];
                float *slot = states + (source * lines + first) * size;
                if (source >= 0) copy_rows(*state, vectors * LANES, slot, size, count, size);
                int64_t last = -1;
                Vector decay = {0};
                for (int64_t line = first; line < first + count; line++) {
                    const int64_t head = line / channels, group = t * groups + head / (heads / groups);
                    const float step = steps[t * heads + head], x = inputs[t * lines + line];
                    if (!own && head != last) decay = same(exponential(step * a[head]));
                    last = head;
                    const Vector written = same(step * x);
                    Vector sum = {0};
                    for (int64_t v = 0; v < vectors; v++) {
                        const int64_t from = v * LANES, some = less(LANES, size - from);
                        Vector *at = (Vector *)state[line - first] + v;
                        if (own) decay = exponentials(first_of(a + head * size + from, some) * step);
                        *at = fused(written, first_of(b + group * size + from, some), *at * decay);
                        sum = fused(*at, first_of(c + group * size + from, some), sum);
                    }
                    output[t * lines + line] = fmaf(d[head], x, total(sum));
                }
                slot = states + (target * lines + first) * size;
                if (target >= 0) copy_rows(slot, size, *state, vectors * LANES, count, size);
            }
        }
}
