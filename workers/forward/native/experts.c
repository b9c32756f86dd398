/* Products of tokens with the experts of a mixture. Each token is multiplied with the matrices of its own experts alone.

   The rows of an expert, one for each of its tokens, are multiplied together, so a step reads the weights of an expert
   once. Every row is summed in the order of its inputs, and a token adds its experts in the order of its choice, so no
   other token changes a bit. */

#include <omp.h>

#include "products.h"

/* Which experts compute which tokens. */
typedef struct {
    int64_t experts, tokens, each; /* experts of a token */
    const int64_t *chosen;         /* [tokens, each]; a number that is no expert's chooses none */
    int64_t *ends;                 /* [experts] the end of an expert's rows */
    int64_t *rows;                 /* [tokens, each] the row of a token and its expert, or -1 */
} Routing;

/* Give each token and expert a row: experts in order, then tokens in order. */
static void route(const Routing *routing)
{
    const int64_t count = routing->tokens * routing->each, experts = routing->experts;
    int64_t next[experts];
    memset(next, 0, sizeof next);
    for (int64_t i = 0; i < count; i++)
        if (routing->chosen[i] >= 0 && routing->chosen[i] < experts) next[routing->chosen[i]]++;
    for (int64_t expert = 0, end = 0; expert < experts; expert++) {
        const int64_t first = end;
        routing->ends[expert] = end += next[expert];
        next[expert] = first;
    }
    for (int64_t i = 0; i < count; i++) {
        const int64_t expert = routing->chosen[i];
        routing->rows[i] = expert >= 0 && expert < experts ? next[expert]++ : -1;
    }
}

static int64_t row_count(const Routing *routing)
{
    return routing->ends[routing->experts - 1];
}

/* This thread's share of the products of all experts: `input` [rows, inputs] in the matrices' type. `to` [rows, width] are sums,
   or with GATE what is gated, in the matrices' type. */
static void multiply_all(const Matrix *matrices, const Routing *routing, const void *input, After after, void *to, int64_t width,
                         Barrier *barrier)
{
    const int64_t inputs = matrices->inputs, kind = factor_kind(matrices);
    const int64_t size = kind == BFLOAT16 ? sizeof(uint16_t) : sizeof(float);
    for (int64_t expert = 0, first = 0; expert < routing->experts; first = routing->ends[expert++]) {
        float *sums = (float *)to + first * width;
        const Output output = {after, sums, (char *)to + first * width * size, width, kind};
        const void *own = (const char *)input + first * inputs * size;
        pilotfish_multiply_share(matrices + expert, own, &output, routing->ends[expert] - first, barrier->team);
    }
    pilotfish_wait_for_all(barrier);
}

/* The first products: `x` [tokens, inputs] → `to` float32 [rows, outputs]. If `inner` is not 0, the matrices' blocks have gates
   and ups, and `to` is [rows, inner] in the type of the second products' input. Fills the routing. `input` [tokens * each, inputs]
   receives the rows in the matrices' type. */
void pilotfish_experts_first(const Matrix *matrices, const Routing *routing, const float *x, void *input, void *to, int64_t inner)
{
    const int64_t inputs = matrices->inputs, kind = factor_kind(matrices);
    Barrier barrier = {0};
    route(routing);
#pragma omp parallel
    {
#pragma omp single
        barrier.team = omp_get_num_threads();
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < routing->tokens * routing->each; i++)
            if (routing->rows[i] >= 0) put(input, kind, routing->rows[i] * inputs, x + i / routing->each * inputs, inputs);
        pilotfish_wait_for_all(&barrier);
        multiply_all(matrices, routing, input, inner ? GATE : STORE, to, inner ? inner : matrices->outputs, &barrier);
    }
}

/* The second products, and their sums: `input` [rows, inputs] → `to` [tokens, outputs]. `weights` are [tokens, each]. If there is
   `x` float32 [rows, inputs], `input` first receives it in the matrices' type. `found` [rows, outputs] receives the products. */
void pilotfish_experts_second(const Matrix *matrices, const Routing *routing, const float *x, void *input, const float *weights,
                              float *found, float *to)
{
    const int64_t inputs = matrices->inputs, outputs = matrices->outputs, kind = factor_kind(matrices), each = routing->each;
    Barrier barrier = {0};
#pragma omp parallel
    {
#pragma omp single
        barrier.team = omp_get_num_threads();
        if (x) {
#pragma omp for schedule(static) nowait
            for (int64_t row = 0; row < row_count(routing); row++) put(input, kind, row * inputs, x + row * inputs, inputs);
            pilotfish_wait_for_all(&barrier);
        }
        multiply_all(matrices, routing, input, STORE, found, outputs, &barrier);
#pragma omp for schedule(static) nowait
        for (int64_t token = 0; token < routing->tokens; token++) {
            float *sum = to + token * outputs;
            memset(sum, 0, (size_t)outputs * sizeof *sum);
            for (int64_t i = token * each; i < (token + 1) * each; i++) {
                if (routing->rows[i] < 0) continue;
                const float *one = found + routing->rows[i] * outputs, weight = weights[i];
                for (int64_t o = 0; o < outputs; o++) sum[o] += weight * one[o];
            }
        }
    }
}
