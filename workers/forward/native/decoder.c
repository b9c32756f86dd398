/* All decoder layers of a Llama-like model and its head in one call, on CPU.

   Reading the weights bounds a decoding step. So there is one parallel region for the whole pass, the matrices are
   packed in the order in which they are read, and the operations after a product (bias, residual, gated activation)
   are applied while its results are still in registers.

   Every output is summed over the inputs in one fixed order, whatever the number of rows and threads. A token's logits
   are the same to the last bit, whatever else is in the step, in every precision.

   Activations are float32. They are rounded to bfloat16 if the processor multiplies bfloat16. */

#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>

#include "attention.h"

#if defined(IS_AVX512) || defined(IS_AVX2)
#include <immintrin.h>
#endif

#if defined(IS_AVX512) && defined(__AVX512BF16__)
#define HAS_BFLOAT16_PRODUCTS 1
#else
#define HAS_BFLOAT16_PRODUCTS 0
#endif

#define COLUMNS (2 * LANES) /* outputs of a block: two vectors */
#if REGISTERS == 32
#define ROWS 8 /* rows of activations that are multiplied per reading of the weights */
#else
#define ROWS 6
#endif
#define SPINS 4000 /* spins that a thread waits for the others before it yields its core */
#define AHEAD 8192   /* bytes of weights to prefetch: with many rows, the processor's own prefetcher does not reach far enough */

typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4)));

/* A packed matrix: blocks of COLUMNS outputs, each [inputs, COLUMNS] (bfloat16: [inputs / 2, COLUMNS, 2]). */
typedef struct {
    int64_t kind, inputs, outputs, blocks; /* the last block is padded with zeros */
    const void *weights;
    const float *scale; /* [blocks * COLUMNS] for INT8 */
    const float *bias;  /* [blocks * COLUMNS], or none */
} Matrix;

typedef struct {
    Matrix qkv, out, gate_up, down; /* gate_up: in each block LANES gates and the ups that belong to them */
    const float *input_norm, *post_norm, *query_norm, *key_norm; /* the latter two per head, or none */
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
    int64_t embedding_kind;
    const void *embedding; /* [vocabulary, hidden] */
    const float *cos, *sin; /* [positions, dim] */
} Decoder;

/* A barrier for the threads of a pass. OpenMP's own barrier spins for milliseconds if a thread has lost its core. */
typedef struct {
    atomic_int arrived, generation;
    int team;
} Barrier;

typedef struct {
    const int64_t *tokens;   /* [tokens] */
    const int64_t *selected; /* [count] indices of the tokens whose logits are computed */
    int64_t count;
    float *logits;         /* [count, vocabulary] */
    float *x;              /* [tokens, hidden] the residual stream */
    void *input;           /* [tokens, widest] what the next product multiplies */
    void *gated;           /* [tokens, inner] the input of the down projection */
    float *qkv;            /* [tokens, (heads + 2 kv_heads) * dim] */
    float *query;          /* [tokens, heads, dim] */
    void *key, *value;     /* [tokens, kv_heads, dim] as they are stored */
    int64_t layers;        /* the first layers of the model, which are computed */
    const uint8_t *skip;   /* [layers] parts of each layer that are not computed, or none */
    const float *exit_norm; /* [hidden] replaces the weight of the final norm, or none */
    const float *inputs;   /* [tokens, hidden] enter the first layer instead of the tokens' embeddings, or none */
    const int64_t *taps;   /* [tap_count] numbers of layers after which the residual stream is copied */
    int64_t tap_count;
    uint16_t *hidden;      /* [tokens, tap_count, hidden] these copies, rounded to bfloat16 */
} Pass;

enum { SKIP_ATTENTION = 1, SKIP_MLP = 2 };

static void wait_for_all(Barrier *barrier)
{
    const int generation = atomic_load_explicit(&barrier->generation, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&barrier->arrived, 1, memory_order_acq_rel) == barrier->team - 1) {
        atomic_store_explicit(&barrier->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&barrier->generation, generation + 1, memory_order_release);
        return;
    }
    for (int waited = 0; atomic_load_explicit(&barrier->generation, memory_order_acquire) == generation; waited++)
        if (waited > SPINS) sched_yield();
}

/* --- products -------------------------------------------------------------------------------- */

typedef enum { STORE, ADD, GATE } After;

typedef struct {
    After after;
    float *to;      /* STORE, ADD: [rows, width] */
    void *input;    /* GATE: [rows, width] in the type of the next product's input */
    int64_t width;
    int64_t kind;   /* GATE: kind of the next product's input */
} Output;

static inline float sigmoid_weighted(float x)
{
    const float small = exponential(x < 0 ? x : -x); /* e^-|x| */
    return x * (x < 0 ? small : 1.0f) / (1.0f + small);
}

/* The type of a matrix's input. */
static inline int64_t factor_kind(const Matrix *matrix)
{
    return matrix->kind == BFLOAT16 && HAS_BFLOAT16_PRODUCTS ? BFLOAT16 : FLOAT32;
}

/* Apply the operations after a product to one row of a block. */
static inline void finish(const Matrix *matrix, const Output *output, int64_t block, int64_t row, Vector first, Vector second)
{
    const int64_t at = block * COLUMNS;
    if (matrix->scale) {
        first *= *(const Vector *)(matrix->scale + at);
        second *= *(const Vector *)(matrix->scale + at + LANES);
    }
    if (matrix->bias) {
        first += *(const Vector *)(matrix->bias + at);
        second += *(const Vector *)(matrix->bias + at + LANES);
    }
    float value[COLUMNS];
    memcpy(value, &first, sizeof first);
    memcpy(value + LANES, &second, sizeof second);
    if (output->after == GATE) {
        for (int c = 0; c < LANES; c++) value[c] = sigmoid_weighted(value[c]) * value[LANES + c];
        const int64_t from = at / 2, left = output->width - from;
        if (left > 0)
            put(output->input, output->kind, row * output->width + from, value, left < LANES ? left : LANES);
        return;
    }
    float *to = output->to + row * output->width + at;
    const int64_t left = matrix->outputs - at, count = left < COLUMNS ? left : COLUMNS;
    if (output->after == ADD)
        for (int64_t c = 0; c < count; c++) to[c] += value[c];
    else
        memcpy(to, value, (size_t)count * sizeof *value);
}

#define INLINE static inline __attribute__((always_inline))

/* A block of outputs, the first row, the index of this reading of the weights, and the number of readings. */
typedef struct {
    int64_t block, row, reading, readings;
} Tile;

/* The weights to prefetch. If a block is read several times, each reading prefetches its share of the next block, so
   that memory is read evenly and not only during the first reading. */
typedef struct {
    const char *at;
    int64_t stride; /* bytes for each pair of vectors */
} Prefetch;

INLINE Prefetch prefetch_plan(const void *weights, int64_t bytes, int64_t stride, int64_t reading, int64_t readings)
{
    if (readings == 1) return (Prefetch){(const char *)weights + AHEAD, stride};
    return (Prefetch){(const char *)weights + bytes + reading * bytes / readings, (stride + readings - 1) / readings};
}

INLINE void prefetch_next(Prefetch *next)
{
    __builtin_prefetch(next->at, 0, 3);
    if (next->stride > LINE) __builtin_prefetch(next->at + LINE, 0, 3);
    next->at += next->stride;
}

INLINE void rows_float32(const Matrix *matrix, const float *x, const Tile *tile, int rows, Vector sum[][2])
{
    const int64_t inputs = matrix->inputs, bytes = COLUMNS * (int64_t)sizeof(float);
    const float *weights = (const float *)matrix->weights + tile->block * inputs * COLUMNS;
    Prefetch next = prefetch_plan(weights, inputs * bytes, bytes, tile->reading, tile->readings);
    for (int64_t k = 0; k < inputs; k++, weights += COLUMNS) {
        prefetch_next(&next);
        const Vector first = *(const Vector *)weights, second = *(const Vector *)(weights + LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            sum[r][0] += first * x[r * inputs + k];
            sum[r][1] += second * x[r * inputs + k];
        }
    }
}

INLINE Vector widen_bytes(const int8_t *from)
{
#if defined(IS_AVX512)
    return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(IS_AVX2)
    return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    Vector wide;
    for (int l = 0; l < LANES; l++) wide[l] = (float)from[l];
    return wide;
#endif
}

INLINE void rows_int8(const Matrix *matrix, const float *x, const Tile *tile, int rows, Vector sum[][2])
{
    const int64_t inputs = matrix->inputs;
    const int8_t *weights = (const int8_t *)matrix->weights + tile->block * inputs * COLUMNS;
    Prefetch next = prefetch_plan(weights, inputs * COLUMNS, COLUMNS, tile->reading, tile->readings);
    for (int64_t k = 0; k < inputs; k++, weights += COLUMNS) {
        prefetch_next(&next);
        const Vector first = widen_bytes(weights), second = widen_bytes(weights + LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            sum[r][0] += first * x[r * inputs + k];
            sum[r][1] += second * x[r * inputs + k];
        }
    }
}

#if HAS_BFLOAT16_PRODUCTS
INLINE Vector two_products(Vector sum, Words weights, uint32_t pair)
{
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32((int)pair));
}

INLINE void rows_bfloat16(const Matrix *matrix, const void *input, const Tile *tile, int rows, Vector sum[][2])
{
    const int64_t pairs = matrix->inputs / 2, bytes = COLUMNS * (int64_t)sizeof(uint32_t);
    const uint32_t *weights = (const uint32_t *)matrix->weights + tile->block * pairs * COLUMNS;
    const uint32_t *x = (const uint32_t *)input + tile->row * pairs;
    Prefetch next = prefetch_plan(weights, pairs * bytes, bytes, tile->reading, tile->readings);
    for (int64_t k = 0; k < pairs; k++, weights += COLUMNS) {
        prefetch_next(&next);
        const Words first = *(const Words *)weights, second = *(const Words *)(weights + LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            sum[r][0] = two_products(sum[r][0], first, x[r * pairs + k]);
            sum[r][1] = two_products(sum[r][1], second, x[r * pairs + k]);
        }
    }
}
#else
INLINE void rows_bfloat16(const Matrix *matrix, const void *input, const Tile *tile, int rows, Vector sum[][2])
{
    const int64_t inputs = matrix->inputs, bytes = COLUMNS * (int64_t)sizeof(uint32_t);
    const uint32_t *weights = (const uint32_t *)matrix->weights + tile->block * inputs / 2 * COLUMNS;
    const float *x = (const float *)input + tile->row * inputs;
    Prefetch next = prefetch_plan(weights, inputs / 2 * bytes, bytes, tile->reading, tile->readings);
    for (int64_t k = 0; k < inputs; k += 2, weights += COLUMNS) {
        prefetch_next(&next);
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) { /* of a pair of inputs, the even one is in the lower half of the words */
            const Words first = *(const Words *)weights, second = *(const Words *)(weights + LANES);
            const Vector one = (Vector)(odd ? first & 0xffff0000u : first << 16);
            const Vector other = (Vector)(odd ? second & 0xffff0000u : second << 16);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                sum[r][0] += one * x[r * inputs + k + odd];
                sum[r][1] += other * x[r * inputs + k + odd];
            }
        }
    }
}
#endif

INLINE void some_rows(const Matrix *matrix, const void *input, const Output *output, const Tile *tile, int rows)
{
    Vector sum[ROWS][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = (Vector){0};
    const int64_t inputs = matrix->inputs;
    if (matrix->kind == BFLOAT16) rows_bfloat16(matrix, input, tile, rows, sum);
    else if (matrix->kind == INT8) rows_int8(matrix, (const float *)input + tile->row * inputs, tile, rows, sum);
    else rows_float32(matrix, (const float *)input + tile->row * inputs, tile, rows, sum);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) finish(matrix, output, tile->block, tile->row + r, sum[r][0], sum[r][1]);
}

/* Compute this thread's share of a product of `rows` rows, then wait for all threads. */
static void multiply(const Matrix *matrix, const void *input, const Output *output, int64_t rows, Barrier *barrier)
{
    const int64_t readings = (rows + ROWS - 1) / ROWS;
#pragma omp for schedule(static) nowait
    for (int64_t block = 0; block < matrix->blocks; block++) {
        for (int64_t row = 0; row < rows; row += ROWS) {
            const Tile tile = {block, row, row / ROWS, readings};
            switch (rows - row) {
            case 1: some_rows(matrix, input, output, &tile, 1); break;
            case 2: some_rows(matrix, input, output, &tile, 2); break;
            case 3: some_rows(matrix, input, output, &tile, 3); break;
            case 4: some_rows(matrix, input, output, &tile, 4); break;
            case 5: some_rows(matrix, input, output, &tile, 5); break;
#if ROWS > 6
            case 6: some_rows(matrix, input, output, &tile, 6); break;
            case 7: some_rows(matrix, input, output, &tile, 7); break;
#endif
            default: some_rows(matrix, input, output, &tile, ROWS);
            }
        }
    }
    wait_for_all(barrier);
}

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

static void normalise(const float *x, const float *weight, int64_t count, float epsilon, void *input, int64_t kind, int64_t at)
{
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
    else pilotfish_store_float32(step, layer, token);
}

static Layer attention_of(const Decoder *decoder, const DecoderLayer *own, const Pass *pass)
{
    const int64_t dim = decoder->dim, wide = decoder->heads * dim, narrow = decoder->kv_heads * dim;
    return (Layer){pass->query, pass->key, pass->value, pass->input, own->keys, own->values,
                   dim, wide, dim, narrow, dim, narrow, FLOAT32, factor_kind(&own->out),
                   decoder->heads, decoder->kv_heads, dim, own->table, own->window, own->sinks, decoder->scale};
}

/* The first half of a layer: x += attention(norm(x)). */
static void attention_part(const Decoder *decoder, const DecoderLayer *own, const Pass *pass, const Step *step,
                           Barrier *barrier)
{
    const int64_t tokens = step->tokens, hidden = decoder->hidden, kind = factor_kind(&own->qkv);
    const Layer layer = attention_of(decoder, own, pass);
    const Output to_qkv = {STORE, pass->qkv, NULL, own->qkv.outputs, kind};
    const Output to_residual = {ADD, pass->x, NULL, hidden, kind};
    int64_t first_tile[step->rows + 1];
    const Items items = pilotfish_items(step, &layer, barrier->team, first_tile);

#pragma omp for schedule(static) nowait
    for (int64_t t = 0; t < tokens; t++)
        normalise(pass->x + t * hidden, own->input_norm, hidden, decoder->epsilon, pass->input, kind, t * hidden);
    wait_for_all(barrier);
    multiply(&own->qkv, pass->input, &to_qkv, tokens, barrier);
#pragma omp for schedule(static) nowait
    for (int64_t t = 0; t < tokens; t++) prepare_attention(decoder, own, pass, step, &layer, t);
    wait_for_all(barrier);
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t item = 0; item < items.count; item++) {
        if (decoder->kv_kind == BFLOAT16) pilotfish_item_bfloat16(step, &layer, &items, item);
        else pilotfish_item_float32(step, &layer, &items, item);
    }
    wait_for_all(barrier);
    multiply(&own->out, pass->input, &to_residual, tokens, barrier);
}

/* The second half of a layer: x += mlp(norm(x)). */
static void mlp_part(const Decoder *decoder, const DecoderLayer *own, const Pass *pass, const Step *step,
                     Barrier *barrier)
{
    const int64_t tokens = step->tokens, hidden = decoder->hidden, kind = factor_kind(&own->gate_up);
    const Output to_gated = {GATE, NULL, pass->gated, decoder->inner, kind};
    const Output to_residual = {ADD, pass->x, NULL, hidden, kind};
#pragma omp for schedule(static) nowait
    for (int64_t t = 0; t < tokens; t++)
        normalise(pass->x + t * hidden, own->post_norm, hidden, decoder->epsilon, pass->input, kind, t * hidden);
    wait_for_all(barrier);
    multiply(&own->gate_up, pass->input, &to_gated, tokens, barrier);
    multiply(&own->down, pass->gated, &to_residual, tokens, barrier);
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

static void embed(const Decoder *decoder, const Pass *pass, int64_t token)
{
    const int64_t hidden = decoder->hidden, from = pass->inputs ? 0 : pass->tokens[token] * hidden;
    float *to = pass->x + token * hidden;
    if (pass->inputs)
        memcpy(to, pass->inputs + token * hidden, (size_t)hidden * sizeof *to);
    else if (decoder->embedding_kind == BFLOAT16)
        for (int64_t i = 0; i < hidden; i++) to[i] = widen_bfloat16(((const uint16_t *)decoder->embedding)[from + i]);
    else
        memcpy(to, (const float *)decoder->embedding + from, (size_t)hidden * sizeof *to);
}

/* One product: x [rows, inputs] → to [rows, outputs]. `narrow` [rows, inputs] receives x as bfloat16 if the product
   multiplies bfloat16; else it is not used. */
void pilotfish_linear(const Matrix *matrix, const float *x, uint16_t *narrow, float *to, int64_t rows)
{
    const int64_t inputs = matrix->inputs, kind = factor_kind(matrix);
    const Output output = {STORE, to, NULL, matrix->outputs, kind};
    Barrier barrier = {0};
#pragma omp parallel
    {
#pragma omp single
        barrier.team = omp_get_num_threads();
        if (kind == BFLOAT16) {
#pragma omp for schedule(static) nowait
            for (int64_t r = 0; r < rows; r++) put(narrow, BFLOAT16, r * inputs, x + r * inputs, inputs);
            wait_for_all(&barrier);
        }
        multiply(matrix, kind == BFLOAT16 ? (const void *)narrow : x, &output, rows, &barrier);
    }
}

/* --- drafting modules ------------------------------------------------------------------------ */

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
    void *input, *gated;      /* work buffers as in Pass */
    float *qkv, *query;
} WindowPass;

static inline float product(const float *one, const float *other, int64_t count)
{
    Vector lanes[2] = {{0}, {0}};
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        lanes[0] += *(const Vector *)(one + i) * *(const Vector *)(other + i);
        lanes[1] += *(const Vector *)(one + i + LANES) * *(const Vector *)(other + i + LANES);
    }
    lanes[0] += lanes[1];
    float sum = 0.0f;
#if defined(IS_AVX512)
    sum = _mm512_reduce_add_ps((__m512)lanes[0]);
#else
    for (int l = 0; l < LANES; l++) sum += lanes[0][l];
#endif
    for (; i < count; i++) sum += one[i] * other[i];
    return sum;
}

/* One query attends to the slots that its token sees, at least one. */
static void attend_slots(const float *query, const float *keys, const float *values, const uint8_t *seen, int64_t slots,
                         int64_t dim, float scale, float *sum)
{
    float weight[slots], most = -INFINITY, total = 0.0f;
    for (int64_t s = 0; s < slots; s++) {
        weight[s] = seen && !seen[s] ? -INFINITY : product(query, keys + s * dim, dim) * scale;
        most = weight[s] > most ? weight[s] : most;
    }
    for (int64_t s = 0; s < slots; s++) weight[s] = exponential(weight[s] - most);
    for (int64_t d = 0; d < dim; d++) sum[d] = 0.0f;
    for (int64_t s = 0; s < slots; s++) {
        if (weight[s] == 0.0f) continue; /* what is stored in a slot that is not seen may be anything */
        total += weight[s];
        for (int64_t d = 0; d < dim; d++) sum[d] += weight[s] * values[s * dim + d];
    }
    for (int64_t d = 0; d < dim; d++) sum[d] /= total;
}

/* Rotate one token's queries and store its rotated key and its value in its slot. */
static void store_in_window(const Decoder *decoder, const WindowPass *pass, int64_t layer, int64_t token)
{
    const int64_t dim = decoder->dim, heads = decoder->heads, kv_heads = decoder->kv_heads;
    const WindowPiece *piece = pass->piece + pass->piece_of[token];
    float *qkv = pass->qkv + token * (heads + 2 * kv_heads) * dim;
    const float *cos = decoder->cos + pass->position[token] * dim, *sin = decoder->sin + pass->position[token] * dim;
    for (int64_t h = 0; h < heads; h++)
        rotate(decoder, qkv + h * dim, NULL, cos, sin, pass->query + (token * heads + h) * dim);
    for (int64_t h = 0; h < kv_heads; h++) {
        const int64_t at = layer * piece->layer + h * piece->head + (piece->slot + token - piece->first) * dim;
        rotate(decoder, qkv + (heads + h) * dim, NULL, cos, sin, piece->keys + at);
        memcpy(piece->values + at, qkv + (heads + kv_heads + h) * dim, (size_t)dim * sizeof *qkv);
    }
}

static void attend_window(const Decoder *decoder, const WindowPass *pass, int64_t layer, int64_t kind, int64_t item)
{
    const int64_t dim = decoder->dim, token = item / decoder->kv_heads, h = item % decoder->kv_heads;
    const int64_t shared = decoder->heads / decoder->kv_heads;
    const WindowPiece *piece = pass->piece + pass->piece_of[token];
    const int64_t from = layer * piece->layer + h * piece->head;
    const uint8_t *seen = piece->seen ? piece->seen + (token - piece->first) * piece->seen_stride : NULL;
    for (int64_t s = 0; s < shared; s++) {
        const int64_t at = (token * decoder->heads + h * shared + s) * dim;
        float sum[dim];
        attend_slots(pass->query + at, piece->keys + from, piece->values + from, seen, piece->slots, dim,
                     decoder->scale, sum);
        put(pass->input, kind, at, sum, dim);
    }
}

/* All layers of a drafting module. Only layers, sizes, epsilon, scale, cos and sin are read of the decoder. */
void pilotfish_window_layers(const Decoder *decoder, const WindowPass *work)
{
    const int64_t tokens = work->tokens, hidden = decoder->hidden;
    const Pass pass = {.x = work->x, .input = work->input, .gated = work->gated};
    const Step step = {.tokens = tokens};
    Barrier barrier = {0};
#pragma omp parallel
    {
#pragma omp single
        barrier.team = omp_get_num_threads();
        for (int64_t l = 0; l < decoder->layers; l++) {
            const DecoderLayer *own = decoder->layer + l;
            const int64_t kind = factor_kind(&own->qkv);
            const Output to_qkv = {STORE, work->qkv, NULL, own->qkv.outputs, kind};
            const Output to_residual = {ADD, work->x, NULL, hidden, kind};
#pragma omp for schedule(static) nowait
            for (int64_t t = 0; t < tokens; t++)
                normalise(work->x + t * hidden, own->input_norm, hidden, decoder->epsilon, work->input, kind, t * hidden);
            wait_for_all(&barrier);
            multiply(&own->qkv, work->input, &to_qkv, tokens, &barrier);
#pragma omp for schedule(static) nowait
            for (int64_t t = 0; t < tokens; t++) store_in_window(decoder, work, l, t);
            wait_for_all(&barrier);
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t item = 0; item < tokens * decoder->kv_heads; item++) attend_window(decoder, work, l, kind, item);
            wait_for_all(&barrier);
            multiply(&own->out, work->input, &to_residual, tokens, &barrier);
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
        if (pass->skip) wait_for_all(&barrier); /* if all parts are skipped, no other barrier follows the embedding */
        const int64_t hidden = decoder->hidden, kind = factor_kind(&decoder->head);
        const float *norm = pass->exit_norm ? pass->exit_norm : decoder->final_norm;
        const Output to_logits = {STORE, pass->logits, NULL, decoder->head.outputs, kind};
#pragma omp for schedule(static) nowait
        for (int64_t s = 0; s < pass->count; s++)
            normalise(pass->x + pass->selected[s] * hidden, norm, hidden, decoder->epsilon, pass->input, kind, s * hidden);
        wait_for_all(&barrier);
        multiply(&decoder->head, pass->input, &to_logits, pass->count, &barrier);
    }
}
