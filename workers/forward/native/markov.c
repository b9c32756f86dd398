/* Ranks the candidates of blocks' slots from left to right, all slots in one call. A Markov head adds to the logits of a slot
   what the token before it says, and the most probable candidates of a slot are the parents of the next slot's.
   markov_ranker.py computes the same by torch.

   What a slot's vector adds to the layer inside the head is the same below all parents, so it is computed once. Each row is
   computed by itself: its candidates do not depend on what else is in a call. */

#include <omp.h>
#include <stddef.h>

#include "largest.h"
#include "products.h"

#define LEAST 1e-6f /* bound of confidences away from 0 and 1 */
#define MUCH (1 << 19) /* products of a depth from which on threads share it: of fewer, they wait longer than they compute */

/* How a token's embedding becomes what is multiplied with the second matrix: as it is, times a gate, or by a recurrent layer. */
enum { AS_IT_IS, GATED, RECURRENT };

typedef struct {
    int64_t kind, rank, hidden;
    int64_t units;       /* outputs of the layer inside: none, a gate, or gate, candidate and output, and the confidence's */
    const void *first;   /* [vocabulary, rank] embeddings of the tokens before */
    int64_t first_kind;  /* FLOAT32 or BFLOAT16 */
    const float *inner;  /* [hidden + rank + rank, units] for the slot's vector, the embedding and the state */
    const float *bias;   /* [units] */
    int64_t is_sure;     /* whether the first candidate's confidence is the last unit's sigmoid */
    Matrix second;       /* [logits, rank] */
} MarkovHead;

typedef struct {
    int64_t rows, depths, siblings;
    int64_t most;              /* parents of a depth at most */
    const int64_t *last;       /* [rows] the token before the first slot */
    const int64_t *vocabulary; /* [logits] their tokens, or none if they are in order */
    const float *hidden;       /* [rows, depths, hidden] */
    const float *base;         /* [rows, depths, logits], with the noise of rows that are drawn */
    const float *factors;      /* [rows] on what the head adds: one divided by the temperature; none: 1 */
    int64_t *tokens;           /* [depths, rows, most, siblings] the candidates below each parent, best first */
    float *confidences;        /* of the same shape */
    int64_t *places;           /* [depths, rows, most] the next depth's parents, by index among a row's candidates */
    /* Work buffers. Those of `most` parents of a row keep their places, the others have the parents of a depth. */
    float *slots;              /* [rows, depths, units] */
    float *states, *kept;      /* [rows, most, rank] */
    float *paths;              /* [rows, most] logarithms of probabilities */
    int64_t *before;           /* [rows, most] tokens of the parents */
    void *input;               /* [rows, parents, rank] in the type of the second matrix's input */
    float *logits;             /* [rows, parents, logits] */
    float *best;               /* [rows, parents, siblings] */
    int64_t *columns;          /* of the same shape */
    float *totals, *sure;      /* [rows, parents] */
} MarkovPass;

static float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* sums [units] += inputs [count] times weights [count, units] */
static void add_units(const float *weights, const float *inputs, int64_t count, int64_t units, float *sums)
{
    for (int64_t i = 0; i < count; i++, weights += units)
        for (int64_t u = 0; u < units; u++) sums[u] = fmaf(inputs[i], weights[u], sums[u]);
}

static void begin_row(const MarkovHead *head, const MarkovPass *pass, int64_t row)
{
    memset(pass->states + row * pass->most * head->rank, 0, (size_t)head->rank * sizeof *pass->states);
    pass->paths[row * pass->most] = 0.0f;
    pass->before[row * pass->most] = pass->last[row];
}

/* What a slot multiplies with the second matrix below a parent, the parent's next state, and the first candidate's confidence. */
static void mix(const MarkovHead *head, const MarkovPass *pass, int64_t depth, int64_t parents, int64_t item)
{
    const int64_t rank = head->rank, units = head->units, row = item / parents, own = row * pass->most + item % parents;
    const float *weights = head->inner + head->hidden * units;
    float embedded[rank], sums[units], *state = pass->states + own * rank;
    const int64_t at = pass->before[own] * rank;
    for (int64_t i = 0; i < rank; i++)
        embedded[i] = head->first_kind == BFLOAT16 ? widen_bfloat16(((const uint16_t *)head->first)[at + i])
                                                   : ((const float *)head->first)[at + i];
    memcpy(sums, pass->slots + (row * pass->depths + depth) * units, sizeof sums);
    add_units(weights, embedded, rank, units, sums);
    if (head->kind == RECURRENT) add_units(weights + rank * units, state, rank, units, sums);
    pass->sure[item] = sigmoid(sums[units - 1]);
    for (int64_t i = 0; i < rank; i++) {
        if (head->kind == GATED) embedded[i] *= sigmoid(sums[i]);
        if (head->kind != RECURRENT) continue;
        const float gate = sigmoid(sums[i]);
        state[i] = gate * state[i] + (1.0f - gate) * tanhf(sums[rank + i]);
        embedded[i] = tanhf(sums[2 * rank + i]);
    }
    for (int64_t i = 0; pass->factors && i < rank; i++) embedded[i] *= pass->factors[row];
    put(pass->input, factor_kind(&head->second), item * rank, embedded, rank);
}

static void lead(const MarkovHead *head, const MarkovPass *pass, int64_t depth, int64_t parents, int64_t item)
{
    const int64_t size = head->second.outputs, row = item / parents;
    const float *base = pass->base + (row * pass->depths + depth) * size;
    float *logits = pass->logits + item * size;
    for (int64_t i = 0; i < size; i++) logits[i] += base[i];
    pilotfish_largest_of_row(logits, size, pass->siblings, pass->best + item * pass->siblings,
                             pass->columns + item * pass->siblings, pass->totals + item);
}

/* The confidences of a parent's candidates. Beside a first one that the head knows, the others keep their shares of the rest. */
static void be_sure(const MarkovHead *head, const MarkovPass *pass, int64_t item, float *confidences)
{
    const float *best = pass->best + item * pass->siblings;
    for (int64_t s = 0; s < pass->siblings; s++) confidences[s] = exponential(best[s] - pass->totals[item]);
    if (!head->is_sure) return;
    const float found = pass->sure[item], sure = found < LEAST ? LEAST : found < 1.0f - LEAST ? found : 1.0f - LEAST;
    const float others = 1.0f - confidences[0], factor = (1.0f - sure) / (others > LEAST ? others : LEAST);
    for (int64_t s = 1; s < pass->siblings; s++) {
        const float share = confidences[s] * factor;
        confidences[s] = share < 1.0f ? share : 1.0f;
    }
    if (confidences[0] > 0.0f) confidences[0] = sure;
}

/* List the candidates of a row at a depth, and make the most probable ones the parents of the next depth: `next` of them. */
static void choose(const MarkovHead *head, const MarkovPass *pass, int64_t depth, int64_t parents, int64_t next, int64_t row)
{
    const int64_t siblings = pass->siblings, rank = head->rank, own = row * pass->most, at = depth * pass->rows * pass->most + own;
    int64_t *tokens = pass->tokens + at * siblings, *places = pass->places + at;
    float *confidences = pass->confidences + at * siblings, scores[pass->most];
    for (int64_t p = 0; p < parents; p++) {
        const int64_t item = row * parents + p;
        be_sure(head, pass, item, confidences + p * siblings);
        for (int64_t s = 0; s < siblings; s++) {
            const int64_t column = pass->columns[item * siblings + s];
            tokens[p * siblings + s] = pass->vocabulary ? pass->vocabulary[column] : column;
        }
    }
    int64_t found = 0;
    for (int64_t c = 0; c < parents * siblings; c++) {
        const float score = pass->paths[own + c / siblings] + logf(confidences[c]);
        if (found == next && !(score > scores[next - 1])) continue;
        int64_t place = found < next ? found++ : next - 1;
        for (; place > 0 && score > scores[place - 1]; place--) scores[place] = scores[place - 1], places[place] = places[place - 1];
        scores[place] = score, places[place] = c;
    }
    for (int64_t n = 0; n < next; n++) {
        pass->paths[own + n] = scores[n];
        pass->before[own + n] = tokens[places[n]];
        memcpy(pass->kept + (own + n) * rank, pass->states + (own + places[n] / siblings) * rank, (size_t)rank * sizeof(float));
    }
    memcpy(pass->states + own * rank, pass->kept + own * rank, (size_t)(next * rank) * sizeof(float));
}

void pilotfish_rank_slots(const MarkovHead *head, const MarkovPass *pass)
{
    const Output to_logits = {STORE, pass->logits, NULL, head->second.outputs, FLOAT32};
    const int is_much = pass->rows * pass->most * head->second.outputs * head->rank >= MUCH;
    Barrier barrier = {0};
#pragma omp parallel if (is_much)
    {
#pragma omp single
        barrier.team = omp_get_num_threads();
#pragma omp for schedule(static) nowait
        for (int64_t slot = 0; slot < pass->rows * pass->depths; slot++) {
            float *sums = pass->slots + slot * head->units;
            memcpy(sums, head->bias, (size_t)head->units * sizeof *sums);
            add_units(head->inner, pass->hidden + slot * head->hidden, head->hidden, head->units, sums);
        }
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < pass->rows; row++) begin_row(head, pass, row);
        pilotfish_wait_for_all(&barrier);
        for (int64_t depth = 0, parents = 1; depth < pass->depths; depth++) {
            const int64_t items = pass->rows * parents, all = parents * pass->siblings, next = all < pass->most ? all : pass->most;
#pragma omp for schedule(static) nowait
            for (int64_t item = 0; item < items; item++) mix(head, pass, depth, parents, item);
            pilotfish_wait_for_all(&barrier);
            pilotfish_multiply(&head->second, pass->input, &to_logits, items, &barrier);
#pragma omp for schedule(static) nowait
            for (int64_t item = 0; item < items; item++) lead(head, pass, depth, parents, item);
            pilotfish_wait_for_all(&barrier);
#pragma omp for schedule(static) nowait
            for (int64_t row = 0; row < pass->rows; row++) choose(head, pass, depth, parents, next, row);
            pilotfish_wait_for_all(&barrier);
            parents = next;
        }
    }
}
