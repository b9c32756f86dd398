/* All layers of an encoder-decoder model's decoder (Marian, BART) and its head in one call, on CPU, or those of its encoder.

   Each layer attends to its own tokens, then to the tokens of its row's source, whose keys and values lie in blocks of
   the same pool, and ends with a feed-forward network. An encoder's layer attends to its own tokens only. A layer norm (Ba et al. 2016) follows each part. Products,
   precision and the order of sums are those of decoder.c. */

#include <omp.h>
#include <stddef.h>

#include "attention.h"
#include "leading.h"
#include "products.h"

typedef struct {
    const float *weight, *bias; /* [hidden] */
} Norm;

typedef struct {
    Matrix qkv, out, query, source_out, up, down; /* `query` and `source_out` are those of cross-attention */
    Norm own_norm, source_norm, final_norm;
    void *keys, *values;
    int64_t table;
} SourcedLayer;

typedef enum { SWISH, RELU, GELU } Activation;

typedef struct {
    int64_t layers, hidden, heads, dim, inner;
    int64_t kv_kind, activation;
    float epsilon, scale, embedding_scale;
    const SourcedLayer *layer;
    Matrix head;
    int64_t embedding_kind;
    const void *embedding;  /* [vocabulary, hidden] */
    const float *positions; /* [positions, hidden] */
    Norm embedding_norm;    /* without weights: none */
    const Screen *screen;   /* of the head, or none */
} SourcedDecoder;

typedef struct {
    const int64_t *tokens;   /* [tokens] */
    const int64_t *selected; /* [count] indices of the tokens whose logits are computed */
    int64_t count;
    float *logits;           /* [count, vocabulary] */
    float *x;                /* [tokens, hidden] the residual stream */
    void *input;             /* [tokens, hidden] what the next product multiplies */
    float *inner;            /* [tokens, inner] results of the up projection */
    void *active;            /* [tokens, inner] the input of the down projection */
    float *qkv;              /* [tokens, 3 * hidden] */
    void *key, *value;       /* [tokens, hidden] as they are stored */
    int64_t layers;          /* the first layers of the model, which are computed */
    const uint8_t *skip;     /* [layers] parts of each layer that are not computed, or none */
    const int64_t *taps;     /* [tap_count] numbers of layers after which the residual stream is copied */
    int64_t tap_count;
    uint16_t *hidden;        /* [tokens, tap_count, hidden] these copies, rounded to bfloat16 */
    const int32_t *places;   /* [tokens] rows of the position embeddings, or none: the step's positions */
    Leading *leading;        /* which logits are wanted, or none: all are. Only with a screen */
} SourcedPass;

enum { SKIP_ATTENTION = 1, SKIP_MLP = 2 };

/* Sums by lanes, so that their order is fixed. */
static inline float sum_of(const float *x, int64_t count, float mean, int squared)
{
    Vector lanes = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Vector part = *(const Vector *)(x + i) - mean;
        lanes += squared ? part * part : part;
    }
    float sum = 0.0f;
    for (int l = 0; l < LANES; l++) sum += lanes[l];
    for (; i < count; i++) sum += squared ? (x[i] - mean) * (x[i] - mean) : x[i] - mean;
    return sum;
}

/* Layer norm in place; the result is the next product's input too. */
static void normalise(float *x, const Norm *norm, int64_t count, float epsilon, void *input, int64_t kind, int64_t at)
{
    if (norm->weight) {
        const float mean = sum_of(x, count, 0.0f, 0) / (float)count;
        const float factor = 1.0f / sqrtf(sum_of(x, count, mean, 1) / (float)count + epsilon);
        for (int64_t i = 0; i < count; i++) x[i] = (x[i] - mean) * factor * norm->weight[i] + norm->bias[i];
    }
    put(input, kind, at, x, count);
}

static void activate(float *x, int64_t count, int64_t activation)
{
    int64_t i = 0;
    for (; activation == SWISH && i + LANES <= count; i += LANES) *(Vector *)(x + i) = sigmoid_weighted(*(const Vector *)(x + i));
    for (; i < count; i++) {
        const float small = exponential(x[i] < 0 ? x[i] : -x[i]); /* e^-|x| */
        if (activation == SWISH) x[i] = x[i] * (x[i] < 0 ? small : 1.0f) / (1.0f + small);
        else if (activation == RELU) x[i] = x[i] < 0 ? 0.0f : x[i];
        else x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
    }
}

static void embed(const SourcedDecoder *decoder, const Step *step, const SourcedPass *pass, int64_t token)
{
    const int64_t hidden = decoder->hidden, kind = factor_kind(&decoder->layer->qkv);
    const float *at = decoder->positions + (pass->places ? pass->places : step->position)[token] * hidden;
    float *to = pass->x + token * hidden;
    for (int64_t i = 0; i < hidden; i++) {
        const int64_t from = pass->tokens[token] * hidden + i;
        const float own = decoder->embedding_kind == BFLOAT16 ? widen_bfloat16(((const uint16_t *)decoder->embedding)[from])
                                                              : ((const float *)decoder->embedding)[from];
        to[i] = own * decoder->embedding_scale + at[i];
    }
    normalise(to, &decoder->embedding_norm, hidden, decoder->epsilon, pass->input, kind, token * hidden);
}

static void attend(const SourcedDecoder *decoder, const Step *step, const Layer *layer, Barrier *barrier)
{
    int64_t first_tile[step->rows + 1];
    const Items items = pilotfish_items(step, layer, decoder->kv_kind, barrier->team, first_tile);
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t left = items.count; left > 0; left--) {
        if (decoder->kv_kind == BFLOAT16) pilotfish_item_bfloat16(step, layer, &items, left - 1);
        else pilotfish_item_float32(step, layer, &items, left - 1);
    }
    pilotfish_wait_for_all(barrier);
}

static Layer attention_of(const SourcedDecoder *decoder, const SourcedLayer *own, const SourcedPass *pass, int64_t width)
{
    const int64_t dim = decoder->dim, hidden = decoder->heads * dim;
    return (Layer){pass->qkv, pass->key, pass->value, pass->input, own->keys, own->values,
                   dim, width, dim, hidden, dim, hidden, FLOAT32, factor_kind(&own->out),
                   decoder->heads, decoder->heads, dim, own->table, 0, 0, decoder->scale};
}

/* Normalise the residual stream after a part of a layer. */
static void end_part(const SourcedDecoder *decoder, const SourcedPass *pass, const Norm *norm, int64_t tokens,
                     int64_t kind, Barrier *barrier)
{
    const int64_t hidden = decoder->hidden;
#pragma omp for schedule(static) nowait
    for (int64_t t = 0; t < tokens; t++)
        normalise(pass->x + t * hidden, norm, hidden, decoder->epsilon, pass->input, kind, t * hidden);
    pilotfish_wait_for_all(barrier);
}

static void attend_own(const SourcedDecoder *decoder, const SourcedLayer *own, const SourcedPass *pass, const Step *step,
                       Barrier *barrier)
{
    const int64_t tokens = step->tokens, hidden = decoder->hidden, kind = factor_kind(&own->qkv);
    const Layer layer = attention_of(decoder, own, pass, 3 * hidden);
    const Output to_qkv = {STORE, pass->qkv, NULL, 3 * hidden, kind}, to_residual = {ADD, pass->x, NULL, hidden, kind};
    pilotfish_multiply(&own->qkv, pass->input, &to_qkv, tokens, barrier);
#pragma omp for schedule(static) nowait
    for (int64_t t = 0; t < tokens; t++) {
        put(pass->key, decoder->kv_kind, t * hidden, pass->qkv + (3 * t + 1) * hidden, hidden);
        put(pass->value, decoder->kv_kind, t * hidden, pass->qkv + (3 * t + 2) * hidden, hidden);
        if (decoder->kv_kind == BFLOAT16) pilotfish_store_bfloat16(step, &layer, t);
        else pilotfish_store_float32(step, &layer, t);
    }
    pilotfish_wait_for_all(barrier);
    attend(decoder, step, &layer, barrier);
    pilotfish_multiply(&own->out, pass->input, &to_residual, tokens, barrier);
}

static void attend_source(const SourcedDecoder *decoder, const SourcedLayer *own, const SourcedPass *pass,
                          const Step *sources, int64_t tokens, Barrier *barrier)
{
    const int64_t hidden = decoder->hidden, kind = factor_kind(&own->query);
    const Layer layer = attention_of(decoder, own, pass, hidden);
    const Output to_query = {STORE, pass->qkv, NULL, hidden, kind}, to_residual = {ADD, pass->x, NULL, hidden, kind};
    pilotfish_multiply(&own->query, pass->input, &to_query, tokens, barrier);
    attend(decoder, sources, &layer, barrier);
    pilotfish_multiply(&own->source_out, pass->input, &to_residual, tokens, barrier);
}

static void feed_forward(const SourcedDecoder *decoder, const SourcedLayer *own, const SourcedPass *pass, int64_t tokens,
                         Barrier *barrier)
{
    const int64_t inner = decoder->inner, kind = factor_kind(&own->down);
    const Output to_inner = {STORE, pass->inner, NULL, inner, kind};
    const Output to_residual = {ADD, pass->x, NULL, decoder->hidden, kind};
    pilotfish_multiply(&own->up, pass->input, &to_inner, tokens, barrier);
    const int64_t parts = inner / 256 > 0 ? inner / 256 : 1; /* one token alone is work for all threads */
#pragma omp for schedule(static) nowait
    for (int64_t item = 0; item < tokens * parts; item++) {
        const int64_t from = item / parts * inner + inner * (item % parts) / parts;
        const int64_t end = item / parts * inner + inner * (item % parts + 1) / parts;
        activate(pass->inner + from, end - from, decoder->activation);
        put(pass->active, kind, from, pass->inner + from, end - from);
    }
    pilotfish_wait_for_all(barrier);
    pilotfish_multiply(&own->down, pass->active, &to_residual, tokens, barrier);
}

/* Copy the residual stream after `layers` layers to the taps that ask for it. */
static void copy_taps(const SourcedDecoder *decoder, const SourcedPass *pass, int64_t tokens, int64_t layers)
{
    const int64_t hidden = decoder->hidden;
    for (int64_t tap = 0; tap < pass->tap_count; tap++) {
        if (pass->taps[tap] != layers) continue;
#pragma omp for schedule(static) nowait
        for (int64_t t = 0; t < tokens; t++)
            put(pass->hidden, BFLOAT16, (t * pass->tap_count + tap) * hidden, pass->x + t * hidden, hidden);
    }
}

/* `sources` has the rows of `step`, and where their sources are stored. Without it, no layer has cross-attention: then
   these are the layers of an encoder, whose tokens see their whole row if the step says that all are at its end, and the
   head projects them to keys and values. */
void pilotfish_decode_sourced(const SourcedDecoder *decoder, const Step *step, const Step *sources, const SourcedPass *pass)
{
    Barrier barrier = {0};
#pragma omp parallel
    {
        const int64_t tokens = step->tokens, hidden = decoder->hidden, kind = factor_kind(&decoder->head);
#pragma omp single
        barrier.team = omp_get_num_threads();
#pragma omp for schedule(static) nowait
        for (int64_t t = 0; t < tokens; t++) embed(decoder, step, pass, t);
        pilotfish_wait_for_all(&barrier);
        for (int64_t l = 0; l < pass->layers; l++) {
            const SourcedLayer *own = decoder->layer + l;
            const uint8_t skip = pass->skip ? pass->skip[l] : 0;
            const int64_t next = factor_kind(&own->qkv); /* every matrix of a model has the same kind of input */
            copy_taps(decoder, pass, tokens, l);
            if (!(skip & SKIP_ATTENTION)) attend_own(decoder, own, pass, step, &barrier);
            end_part(decoder, pass, &own->own_norm, tokens, next, &barrier);
            if (sources) {
                attend_source(decoder, own, pass, sources, tokens, &barrier);
                end_part(decoder, pass, &own->source_norm, tokens, next, &barrier);
            }
            if (!(skip & SKIP_MLP)) feed_forward(decoder, own, pass, tokens, &barrier);
            end_part(decoder, pass, &own->final_norm, tokens, next, &barrier);
        }
        copy_taps(decoder, pass, tokens, pass->layers);
        const Output to_logits = {STORE, pass->logits, NULL, decoder->head.outputs, kind};
#pragma omp for schedule(static) nowait
        for (int64_t s = 0; s < pass->count; s++)
            put(pass->input, kind, s * hidden, pass->x + pass->selected[s] * hidden, hidden);
        pilotfish_wait_for_all(&barrier);
        if (decoder->screen && pass->leading)
            pilotfish_multiply_leading(&decoder->head, decoder->screen, pass->input, pass->logits, pass->count, pass->leading, &barrier);
        else
            pilotfish_multiply(&decoder->head, pass->input, &to_logits, pass->count, &barrier);
    }
}
