/* All decoder layers of a Llama-like model and its head in one call, on CPU.

   Reading the weights bounds a decoding step. So there is one parallel region for the whole pass, the matrices are
   packed in the order in which they are read, and the operations after a product (bias, residual, gated activation)
   are applied while its results are still in registers.

   Every output is summed over the inputs in one fixed order, whatever the number of rows and threads. A token's logits
   are the same to the last bit, whatever else is in the step, in every precision.

   Activations are float32. They are rounded to bfloat16 if the processor multiplies bfloat16. */

#include <omp.h>
#include <stddef.h>

#include "attention.h"
#include "products.h"
#include "windows.h"

typedef struct {
    Matrix qkv[3];     /* queries, keys and values: one matrix or several, and then matrices without outputs */
    Matrix out;
    Matrix gate_up[2]; /* one with LANES gates and the ups that belong to them in each block, and one without outputs; or both */
    Matrix down;
    const float *input_norm, *post_norm, *query_norm, *key_norm; /* the latter two per head, or none; drafts may lack the first */
    void *keys, *values;
    int64_t table, window, sinks;
} DecoderLayer;

typedef struct {
    int64_t layers, hidden, heads, kv_heads, dim, inner;
    int64_t kv_kind; /* kind of stored keys and values */
    float epsilon, scale;
    const DecoderLayer *layer;
    const float *final_norm;
    Matrix head;
    Matrix table;          /* packed embeddings; without weights: the rows of the head */
    int64_t embedding_kind;
    const void *embedding; /* [vocabulary, hidden], or none: the rows of the table, rounded to embedding_kind */
    const float *cos, *sin; /* [positions, dim] */
} Decoder;

typedef struct {
    const int64_t *tokens;   /* [tokens] */
    const int64_t *selected; /* [count] indices of the tokens whose logits are computed */
    int64_t count;
    float *logits;         /* [count, vocabulary] */
    float *x;              /* [tokens, hidden] the residual stream */
    void *input;           /* [tokens, widest] what the next product multiplies */
    void *gated;           /* [tokens, inner] the input of the down projection */
    float *qkv;            /* [tokens, (heads + 2 kv_heads) * dim], or [tokens, 2 inner] for gates and ups of two matrices */
    float *query;          /* [tokens, heads, dim] */
    void *key, *value;     /* [tokens, kv_heads, dim] as they are stored, but in single precision if that is in 8 bits */
    int64_t layers;        /* the first layers of the model, which are computed */
    const uint8_t *skip;   /* [layers] parts of each layer that are not computed, or none */
    const float *exit_norm; /* [hidden] replaces the weight of the final norm, or none */
    const float *inputs;   /* [tokens, hidden] enter the first layer instead of the tokens' embeddings, or none */
    const int64_t *taps;   /* [tap_count] numbers of layers after which the residual stream is copied */
    int64_t tap_count;
    uint16_t *hidden;      /* [tokens, tap_count, hidden] these copies, rounded to bfloat16 */
} Pass;

enum { SKIP_ATTENTION = 1, SKIP_MLP = 2 };

/* --- between products ------------------------------------------------------------------------ */

/* RMS norm (Zhang and Sennrich 2019). Sums by lanes, so that their order is fixed. */
static inline float inverse_rms(const float *x, int64_t count, float epsilon)
{
    Vector lanes = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Vector part = *(const Vector *)(x + i);
        lanes += part * part;
    }
    float sum = 0.0f;
    for (int l = 0; l < LANES; l++) sum += lanes[l];
    for (; i < count; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / (float)count + epsilon);
}

/* Without a weight, the numbers stay as they are. */
static void normalise(const float *x, const float *weight, int64_t count, float epsilon, void *input, int64_t kind, int64_t at)
{
    if (!weight) {
        put(input, kind, at, x, count);
        return;
    }
    const float factor = inverse_rms(x, count, epsilon);
    float part[256];
    for (int64_t first = 0; first < count; first += 256) {
        const int64_t some = count - first < 256 ? count - first : 256;
        for (int64_t i = 0; i < some; i++) part[i] = x[first + i] * factor * weight[first + i];
        put(input, kind, at + first, part, some);
    }
}

/* Normalise one head's query or key if the model does, and apply rotary positions (Su et al. 2021). */
static void rotate(const Decoder *decoder, float *head, const float *norm, const float *cos, const float *sin, float *turned)
{
    const int64_t dim = decoder->dim, half = dim / 2;
    if (norm) {
        const float factor = inverse_rms(head, dim, decoder->epsilon);
        for (int64_t d = 0; d < dim; d++) head[d] *= factor * norm[d];
    }
    for (int64_t d = 0; d < half; d++) turned[d] = head[d] * cos[d] - head[d + half] * sin[d];
    for (int64_t d = 0; d < half; d++) turned[d + half] = head[d + half] * cos[d + half] + head[d] * sin[d + half];
}

static void prepare_attention(const Decoder *decoder, const DecoderLayer *own, const Pass *pass, const Step *step,
                              const Layer *layer, int64_t token)
{
    const int64_t dim = decoder->dim, heads = decoder->heads, kv_heads = decoder->kv_heads;
    float *qkv = pass->qkv + token * (heads + 2 * kv_heads) * dim;
    const float *cos = decoder->cos + step->position[token] * dim, *sin = decoder->sin + step->position[token] * dim;
    for (int64_t h = 0; h < heads; h++)
        rotate(decoder, qkv + h * dim, own->query_norm, cos, sin, pass->query + (token * heads + h) * dim);
    for (int64_t h = 0; h < kv_heads; h++) {
        float key[dim];
        rotate(decoder, qkv + (heads + h) * dim, own->key_norm, cos, sin, key);
        put(pass->key, decoder->kv_kind, (token * kv_heads + h) * dim, key, dim);
    }
    put(pass->value, decoder->kv_kind, token * kv_heads * dim, qkv + (heads + kv_heads) * dim, kv_heads * dim);
    if (decoder->kv_kind == BFLOAT16) pilotfish_store_bfloat16(step, layer, token);
    else if (decoder->kv_kind == INT8) pilotfish_store_int8(step, layer, token); /* from single precision */
    else if (decoder->kv_kind == E4M3) pilotfish_store_e4m3(step, layer, token);
    else pilotfish_store_float32(step, layer, token);
}

static Layer attention_of(const Decoder *decoder, const DecoderLayer *own, const Pass *pass)
{
    const int64_t dim = decoder->dim, wide = decoder->heads * dim, narrow = decoder->kv_heads * dim;
    return (Layer){pass->query, pass->key, pass->value, pass->input, own->keys, own->values,
                   dim, wide, dim, narrow, dim, narrow, FLOAT32, factor_kind(&own->out),
                   decoder->heads, decoder->kv_heads, dim, own->table, own->window, own->sinks, decoder->scale};
}

/* Normalise all rows, and multiply them with `count` matrices, whose outputs lie one after another. The matrices may be stored
   in different ways: the rows are normalised once for each kind of input. Those without outputs are left out. */
static void multiply_normalised(const Decoder *decoder, const Pass *pass, const float *rows, const float *norm,
                                const Matrix *matrices, int64_t count, const Output *output, int64_t tokens, Barrier *barrier)
{
    static const int64_t kinds[] = {FLOAT32, BFLOAT16};
    const int64_t width = matrices->inputs;
    for (int k = 0; k < 2; k++) {
        int is_input = 0;
        for (int64_t m = 0; m < count; m++) is_input |= matrices[m].outputs && factor_kind(matrices + m) == kinds[k];
        if (!is_input) continue;
#pragma omp for schedule(static) nowait
        for (int64_t t = 0; t < tokens; t++)
            normalise(rows + t * width, norm, width, decoder->epsilon, pass->input, kinds[k], t * width);
        pilotfish_wait_for_all(barrier);
        Output to = *output;
        for (int64_t m = 0; m < count; m++) {
            if (matrices[m].outputs && factor_kind(matrices + m) == kinds[k])
                pilotfish_multiply_share(matrices + m, pass->input, &to, tokens, barrier->team);
            if (to.to) to.to += matrices[m].outputs;
        }
        pilotfish_wait_for_all(barrier);
    }
}

static void multiply_qkv(const Decoder *decoder, const DecoderLayer *own, const Pass *pass, const float *rows, int64_t tokens,
                         Barrier *barrier)
{
    const Output output = {STORE, pass->qkv, NULL, (decoder->heads + 2 * decoder->kv_heads) * decoder->dim, FLOAT32};
    multiply_normalised(decoder, pass, rows, own->input_norm, own->qkv, 3, &output, tokens, barrier);
}

/* The first half of a layer: x += attention(norm(x)). */
static void attention_part(const Decoder *decoder, const DecoderLayer *own, const Pass *pass, const Step *step,
                           Barrier *barrier)
{
    const int64_t tokens = step->tokens;
    const Layer layer = attention_of(decoder, own, pass);
    const Output to_residual = {ADD, pass->x, NULL, decoder->hidden, FLOAT32};
    int64_t first_tile[step->rows + 1];
    const Items items = pilotfish_items(step, &layer, decoder->kv_kind, barrier->team, first_tile);

    multiply_qkv(decoder, own, pass, pass->x, tokens, barrier);
#pragma omp for schedule(static) nowait
    for (int64_t t = 0; t < tokens; t++) prepare_attention(decoder, own, pass, step, &layer, t);
    pilotfish_wait_for_all(barrier);
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t left = items.count; left > 0; left--) { /* the last tiles of a prompt take longest */
        const int64_t item = left - 1;
        if (decoder->kv_kind == BFLOAT16) pilotfish_item_bfloat16(step, &layer, &items, item);
        else if (decoder->kv_kind == INT8) pilotfish_item_int8(step, &layer, &items, item);
        else if (decoder->kv_kind == E4M3) pilotfish_item_e4m3(step, &layer, &items, item);
        else pilotfish_item_float32(step, &layer, &items, item);
    }
    pilotfish_wait_for_all(barrier);
    pilotfish_multiply(&own->out, pass->input, &to_residual, tokens, barrier);
}

/* SiLU of `count` gates times the ups after them, as a product with both in one matrix ends. */
static void gate(const float *gates, int64_t count, void *to, int64_t kind, int64_t at)
{
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t some = count - i < LANES ? count - i : LANES;
        float part[LANES];
        Vector first = {0}, second = {0};
        memcpy(&first, gates + i, (size_t)some * sizeof *gates);
        memcpy(&second, gates + count + i, (size_t)some * sizeof *gates);
        const Vector gated = sigmoid_weighted(first) * second;
        memcpy(part, &gated, sizeof gated);
        put(to, kind, at + i, part, some);
    }
}

/* The second half of a layer: x += mlp(norm(x)). */
static void mlp_part(const Decoder *decoder, const DecoderLayer *own, const Pass *pass, const Step *step,
                     Barrier *barrier)
{
    const int64_t tokens = step->tokens, inner = decoder->inner, kind = factor_kind(&own->down);
    const int is_joined = !own->gate_up[1].outputs;
    const Output to_gated = {GATE, NULL, pass->gated, inner, kind}, apart = {STORE, pass->qkv, NULL, 2 * inner, FLOAT32};
    const Output to_residual = {ADD, pass->x, NULL, decoder->hidden, FLOAT32};
    const Output *output = is_joined ? &to_gated : &apart;
    multiply_normalised(decoder, pass, pass->x, own->post_norm, own->gate_up, 2, output, tokens, barrier);
    if (!is_joined) {
#pragma omp for schedule(static) nowait
        for (int64_t t = 0; t < tokens; t++) gate(pass->qkv + 2 * t * inner, inner, pass->gated, kind, t * inner);
        pilotfish_wait_for_all(barrier);
    }
    pilotfish_multiply(&own->down, pass->gated, &to_residual, tokens, barrier);
}

/* Copy the residual stream after `layers` layers to the taps that ask for it.

   No barrier is needed. What reads the stream next divides the tokens alike, and the next write follows a barrier. */
static void copy_taps(const Decoder *decoder, const Pass *pass, const Step *step, int64_t layers)
{
    const int64_t hidden = decoder->hidden;
    for (int64_t tap = 0; tap < pass->tap_count; tap++) {
        if (pass->taps[tap] != layers) continue;
#pragma omp for schedule(static) nowait
        for (int64_t t = 0; t < step->tokens; t++)
            put(pass->hidden, BFLOAT16, (t * pass->tap_count + tap) * hidden, pass->x + t * hidden, hidden);
    }
}

static void embed_packed(const Decoder *decoder, int64_t id, float *to)
{
    if (!decoder->table.weights) {
        pilotfish_row(&decoder->head, id, to);
        return;
    }
    pilotfish_row(&decoder->table, id, to);
    if (decoder->embedding_kind == BFLOAT16)
        for (int64_t i = 0; i < decoder->hidden; i++) to[i] = widen_bfloat16(narrow_bfloat16(to[i]));
}

static void embed(const Decoder *decoder, const Pass *pass, int64_t token)
{
    const int64_t hidden = decoder->hidden, from = pass->inputs ? 0 : pass->tokens[token] * hidden;
    float *to = pass->x + token * hidden;
    if (pass->inputs)
        memcpy(to, pass->inputs + token * hidden, (size_t)hidden * sizeof *to);
    else if (!decoder->embedding)
        embed_packed(decoder, pass->tokens[token], to);
    else if (decoder->embedding_kind == BFLOAT16)
        for (int64_t i = 0; i < hidden; i++) to[i] = widen_bfloat16(((const uint16_t *)decoder->embedding)[from + i]);
    else
        memcpy(to, (const float *)decoder->embedding + from, (size_t)hidden * sizeof *to);
}

/* RMS norms of the inputs of a product: from input `plain` on, each `group` of neighbours is normalised by itself. */
typedef struct {
    int64_t plain, group; /* inputs - plain is a multiple of group */
    float epsilon;
    const float *weight; /* [inputs - plain] */
} InputNorm;

static void prepare_input(const float *x, const InputNorm *norm, int64_t inputs, void *input, int64_t kind, int64_t at)
{
    const int64_t plain = norm ? norm->plain : inputs;
    put(input, kind, at, x, plain);
    for (int64_t first = plain; first < inputs; first += norm->group)
        normalise(x + first, norm->weight + first - plain, norm->group, norm->epsilon, input, kind, at + first);
}

/* One product: x [rows, inputs] → to [rows, outputs], with a norm of the inputs or none. `input` [rows, inputs] receives
   what is multiplied, in its type. */
void pilotfish_linear(const Matrix *matrix, const InputNorm *norm, const float *x, void *input, float *to, int64_t rows)
{
    const int64_t inputs = matrix->inputs, kind = factor_kind(matrix);
    const int has_input = norm || kind == BFLOAT16;
    const Output output = {STORE, to, NULL, matrix->outputs, kind};
    Barrier barrier = {0};
#pragma omp parallel
    {
#pragma omp single
        barrier.team = omp_get_num_threads();
        if (has_input) {
#pragma omp for schedule(static) nowait
            for (int64_t r = 0; r < rows; r++) prepare_input(x + r * inputs, norm, inputs, input, kind, r * inputs);
            pilotfish_wait_for_all(&barrier);
        }
        pilotfish_multiply(matrix, has_input ? input : x, &output, rows, &barrier);
    }
}

int pilotfish_has_bfloat16_products(void)
{
    return HAS_BFLOAT16_PRODUCTS;
}

/* One product with the inputs of its matrix as they are: x [rows, inputs] → to [rows, outputs], both bfloat16. */
void pilotfish_linear_bfloat16(const Matrix *matrix, const uint16_t *x, uint16_t *to, int64_t rows)
{
    const Output output = {ROUND, NULL, to, matrix->outputs, BFLOAT16};
    Barrier barrier = {0};
#pragma omp parallel
    {
#pragma omp single
        barrier.team = omp_get_num_threads();
        pilotfish_multiply(matrix, x, &output, rows, &barrier);
    }
}

/* --- drafting modules ------------------------------------------------------------------------ */

enum { MOST_TOGETHER = 96 }; /* most queries that attend together */

/* Consecutive tokens of one sequence, and the slots that they attend to. Slots have keys and values side by side, so
   no block table is needed. */
typedef struct {
    float *keys, *values; /* [layers, kv_heads, slots, dim], contiguous in the last two */
    int64_t layer, head;  /* strides of layers and heads, in elements */
    int64_t first, slot;  /* the first token's index in the pass, and its slot; the others follow */
    int64_t slots;        /* number of slots up to the last token's */
    const uint8_t *seen;  /* [tokens, slots], which slots each token attends to, or none if it is all */
    int64_t seen_stride;  /* 0 if all tokens attend to the same slots */
} WindowPiece;

typedef struct {
    int64_t tokens;
    const int64_t *position;  /* [tokens] absolute */
    const int32_t *piece_of;  /* [tokens] */
    const WindowPiece *piece;
    float *x;                 /* [tokens, hidden] the residual stream before the layers, then after them */
    const float *inputs;      /* [tokens, inputs of its matrix] what the first layer's attention reads instead of x, or none */
    void *input, *gated;      /* work buffers as in Pass */
    float *qkv, *query;
} WindowPass;

/* Rotate one token's queries and store its rotated key and its value in its slot. */
static void store_in_window(const Decoder *decoder, const WindowPass *pass, int64_t layer, int64_t token)
{
    const DecoderLayer *own = decoder->layer + layer;
    const int64_t dim = decoder->dim, heads = decoder->heads, kv_heads = decoder->kv_heads;
    const WindowPiece *piece = pass->piece + pass->piece_of[token];
    float *qkv = pass->qkv + token * (heads + 2 * kv_heads) * dim;
    const float *cos = decoder->cos + pass->position[token] * dim, *sin = decoder->sin + pass->position[token] * dim;
    for (int64_t h = 0; h < heads; h++)
        rotate(decoder, qkv + h * dim, own->query_norm, cos, sin, pass->query + (token * heads + h) * dim);
    for (int64_t h = 0; h < kv_heads; h++) {
        const int64_t at = layer * piece->layer + h * piece->head + (piece->slot + token - piece->first) * dim;
        rotate(decoder, qkv + (heads + h) * dim, own->key_norm, cos, sin, piece->keys + at);
        memcpy(piece->values + at, qkv + (heads + kv_heads + h) * dim, (size_t)dim * sizeof *qkv);
    }
}

/* Tokens of a piece that attend together, and so read each key once: fewer where more threads have nothing else to do. */
static int64_t tokens_together(const Decoder *decoder, int64_t tokens, int64_t team)
{
    const int64_t most = MOST_TOGETHER / (decoder->heads / decoder->kv_heads), fair = tokens * decoder->kv_heads / (2 * team);
    const int64_t bounded = fair < most ? fair : most;
    return bounded > 1 ? bounded : 1;
}

/* The tokens from the item's one on attend with one key-value head, if that token is the first one of `together`. */
static void attend_window(const Decoder *decoder, const WindowPass *pass, int64_t layer, int64_t kind, int64_t together,
                          int64_t item)
{
    const int64_t dim = decoder->dim, token = item / decoder->kv_heads, h = item % decoder->kv_heads;
    const int64_t each = decoder->heads / decoder->kv_heads, wide = each * dim;
    const WindowPiece *piece = pass->piece + pass->piece_of[token];
    const int64_t own = token - piece->first, left = piece->slots - piece->slot - own, count = left < together ? left : together;
    if (own % together) return;
    const int64_t from = layer * piece->layer + h * piece->head, at = (token * decoder->kv_heads + h) * wide;
    const int64_t step = decoder->kv_heads * wide; /* from token to token */
    const uint8_t *seen = piece->seen ? piece->seen + own * piece->seen_stride : NULL;
    const Slots slots = {piece->keys + from, piece->values + from, seen, piece->seen_stride, piece->slots, dim};
    float queries[count * wide], sums[count * wide];
    for (int64_t t = 0; t < count; t++) memcpy(queries + t * wide, pass->query + at + t * step, (size_t)wide * sizeof *queries);
    pilotfish_attend_slots(queries, count, each, &slots, decoder->scale, sums);
    for (int64_t t = 0; t < count; t++) put(pass->input, kind, at + t * step, sums + t * wide, wide);
}

/* All layers of a drafting module. Only layers, sizes, epsilon, scale, cos and sin are read of the decoder. */
void pilotfish_window_layers(const Decoder *decoder, const WindowPass *work)
{
    const int64_t tokens = work->tokens;
    const Pass pass = {.x = work->x, .input = work->input, .gated = work->gated, .qkv = work->qkv};
    const Step step = {.tokens = tokens};
    Barrier barrier = {0};
#pragma omp parallel
    {
#pragma omp single
        barrier.team = omp_get_num_threads();
        const int64_t together = tokens_together(decoder, tokens, barrier.team);
        for (int64_t l = 0; l < decoder->layers; l++) {
            const DecoderLayer *own = decoder->layer + l;
            const int64_t kind = factor_kind(&own->out);
            const Output to_residual = {ADD, work->x, NULL, decoder->hidden, FLOAT32};
            multiply_qkv(decoder, own, &pass, l || !work->inputs ? work->x : work->inputs, tokens, &barrier);
#pragma omp for schedule(static) nowait
            for (int64_t t = 0; t < tokens; t++) store_in_window(decoder, work, l, t);
            pilotfish_wait_for_all(&barrier);
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t item = 0; item < tokens * decoder->kv_heads; item++)
                attend_window(decoder, work, l, kind, together, item);
            pilotfish_wait_for_all(&barrier);
            pilotfish_multiply(&own->out, work->input, &to_residual, tokens, &barrier);
            mlp_part(decoder, own, &pass, &step, &barrier);
        }
    }
}

/* The number of outputs per block of a packed matrix. */
int64_t pilotfish_columns(void)
{
    return COLUMNS;
}

void pilotfish_decode(const Decoder *decoder, const Step *step, const Pass *pass)
{
    Barrier barrier = {0};
#pragma omp parallel
    {
#pragma omp single
        barrier.team = omp_get_num_threads();
#pragma omp for schedule(static) /* the first layer divides the tokens alike, so no barrier is needed */ nowait
        for (int64_t t = 0; t < step->tokens; t++) embed(decoder, pass, t);
        for (int64_t l = 0; l < pass->layers; l++) {
            const uint8_t skip = pass->skip ? pass->skip[l] : 0;
            copy_taps(decoder, pass, step, l);
            if (!(skip & SKIP_ATTENTION)) attention_part(decoder, decoder->layer + l, pass, step, &barrier);
            if (!(skip & SKIP_MLP)) mlp_part(decoder, decoder->layer + l, pass, step, &barrier);
        }
        copy_taps(decoder, pass, step, pass->layers);
        if (pass->skip) pilotfish_wait_for_all(&barrier); /* if all parts are skipped, no other barrier follows the embedding */
        const int64_t hidden = decoder->hidden, kind = factor_kind(&decoder->head);
        const float *norm = pass->exit_norm ? pass->exit_norm : decoder->final_norm;
        const Output to_logits = {STORE, pass->logits, NULL, decoder->head.outputs, kind};
#pragma omp for schedule(static) nowait
        for (int64_t s = 0; s < pass->count; s++)
            normalise(pass->x + pass->selected[s] * hidden, norm, hidden, decoder->epsilon, pass->input, kind, s * hidden);
        pilotfish_wait_for_all(&barrier);
        pilotfish_multiply(&decoder->head, pass->input, &to_logits, pass->count, &barrier);
    }
}
