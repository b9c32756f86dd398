/* Paged attention for ragged rows of committed tokens and token trees, on CPU.

   One call serves all rows of a step in one layer. It stores the fresh keys and values, then lets every query attend
   to the positions it sees: the committed ones up to itself (within its window, or among the sinks), and, for a node
   of a tree, its ancestors. Keys are taken in tiles of sixteen positions, read straight from the pool's blocks; the
   softmax is computed while reading (Milakov and Gimelshein 2018; Dao et al. 2022), in single precision.

   Work is divided by row, KV head and tile of queries. A query's sums run over its own positions, in their order, in
   tiles that begin at fixed positions: neither the batch, nor the number of threads, nor where in a tree a token
   stands changes a bit of the result. */

#include "attention.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define KEYS 16         /* positions per tile */
#define LANES 16        /* floats that are summed side by side */
#define QUERIES 24      /* query vectors per item of work, about */
#define MOST_VECTORS 64 /* query vectors per item at most: heads that share a KV head */
#define MOST_DIM 256    /* largest head dimension */

typedef float Vector __attribute__((vector_size(64), aligned(4)));

typedef struct {
    float query[MOST_VECTORS][MOST_DIM], sum[MOST_VECTORS][MOST_DIM], most[MOST_VECTORS], total[MOST_VECTORS];
    float keys[KEYS][MOST_DIM], values[KEYS][MOST_DIM];
} Work;

/* What is no finite number is stored as one: a freed block may be read, masked, by the next sequence that gets it. */
static inline uint16_t finite_bfloat16(uint16_t value)
{
    if ((value & 0x7f80) != 0x7f80) return value;
    return (value & 0x7f) ? 0 : (uint16_t)((value & 0x8000) | 0x7f7f);
}

static inline float finite_float32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7f800000u) != 0x7f800000u) return value;
    bits = (bits & 0x7fffffu) ? 0 : ((bits & 0x80000000u) | 0x7f7fffffu);
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Which of the positions first … first + KEYS - 1 the token sees, as bits. */
static inline uint32_t visible(const Step *step, const Layer *layer, int64_t token, int64_t first)
{
    const int64_t own = step->position[token];
    uint32_t seen = 0;
    for (int k = 0; k < KEYS && first + k <= own; k++) {
        const int64_t at = first + k;
        if (!layer->window || own - at < layer->window || at < layer->sinks) seen |= 1u << k;
    }
    return seen;
}

/* Where the key that the token sees at a position is stored, counted from the row's beginning. */
static inline int64_t place_of(const Step *step, int64_t row, int64_t token, int64_t at)
{
    const int64_t base = step->base_len[row];
    return at < base ? at : base + step->path[token * step->most_depth + at - base];
}

/* In an order of its own, but always the same one. */
static inline float sum_of_lanes(Vector part)
{
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)part);
#else
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) part[l] += part[l + half];
    return part[0];
#endif
}

/* One tile of keys and values for one query vector: the running softmax. */
static inline void weigh(Work *work, int64_t v, uint32_t mask, int64_t padded)
{
    float weight[KEYS], largest = work->most[v];
    for (int k = 0; k < KEYS; k++) {
        Vector part = {0};
        for (int64_t d = 0; d < padded; d += LANES)
            part += *(const Vector *)(work->query[v] + d) * *(const Vector *)(work->keys[k] + d);
        weight[k] = sum_of_lanes(part);
    }
    for (int k = 0; k < KEYS; k++) weight[k] = (mask >> k) & 1 ? weight[k] : -INFINITY;
    for (int k = 0; k < KEYS; k++) largest = weight[k] > largest ? weight[k] : largest;
    for (int k = 0; k < KEYS; k++) weight[k] = exponential(weight[k] - largest);
    float added = 0.0f;
    for (int k = 0; k < KEYS; k++) added += weight[k];
    const float kept = exponential(work->most[v] - largest);
    work->total[v] = work->total[v] * kept + added;
    work->most[v] = largest;
    for (int64_t d = 0; d < padded; d += LANES) {
        Vector part = *(const Vector *)(work->sum[v] + d) * kept;
        for (int k = 0; k < KEYS; k++) part += *(const Vector *)(work->values[k] + d) * weight[k];
        *(Vector *)(work->sum[v] + d) = part;
    }
}

static inline int64_t tokens_per_item(const Layer *layer)
{
    const int64_t shared = layer->heads / layer->kv_heads;
    return shared >= QUERIES ? 1 : QUERIES / shared;
}

int64_t pilotfish_items(const Step *step, const Layer *layer, int64_t *item_of)
{
    const int64_t tile = tokens_per_item(layer);
    int64_t items = 0;
    for (int64_t row = 0; row < step->rows; row++) {
        item_of[row] = items;
        items += (step->first_token[row + 1] - step->first_token[row] + tile - 1) / tile * layer->kv_heads;
    }
    item_of[step->rows] = items;
    return items;
}

#define DEFINE(NAME, TYPE, WIDEN, NARROW, FINITE)                                                                      \
                                                                                                                       \
void pilotfish_store_##NAME(const Step *step, const Layer *layer, int64_t token)                                       \
{                                                                                                                      \
    const int64_t dim = layer->dim;                                                                                    \
    const int64_t slot = step->slots[layer->table * step->tokens + token] * layer->kv_heads;                           \
    for (int64_t head = 0; head < layer->kv_heads; head++) {                                                           \
        const TYPE *key = (const TYPE *)layer->key + head * layer->key_head + token * layer->key_token;                \
        const TYPE *value = (const TYPE *)layer->value + head * layer->value_head + token * layer->value_token;        \
        TYPE *to_key = (TYPE *)layer->keys + (slot + head) * dim;                                                      \
        TYPE *to_value = (TYPE *)layer->values + (slot + head) * dim;                                                  \
        for (int64_t d = 0; d < dim; d++) to_key[d] = FINITE(key[d]);                                                  \
        for (int64_t d = 0; d < dim; d++) to_value[d] = FINITE(value[d]);                                              \
    }                                                                                                                  \
}                                                                                                                      \
                                                                                                                       \
/* The tile's keys and values as the token sees them; zeros where it sees none. */                                     \
static void load_##NAME(Work *work, const Step *step, const Layer *layer, int64_t row, int64_t head, int64_t token,    \
                        int64_t first, uint32_t seen, int64_t padded)                                                  \
{                                                                                                                      \
    const int64_t dim = layer->dim, size = step->block_size;                                                           \
    const int32_t *blocks = step->blocks + (layer->table * step->rows + row) * step->most_blocks;                      \
    for (int k = 0; k < KEYS; k++) {                                                                                   \
        const int64_t place = (seen >> k) & 1 ? place_of(step, row, token, first + k) : 0;                             \
        const int32_t block = (seen >> k) & 1 ? blocks[place / size] : -1;                                             \
        if (block < 0) {                                                                                               \
            for (int64_t d = 0; d < padded; d++) work->keys[k][d] = work->values[k][d] = 0.0f;                         \
            continue;                                                                                                  \
        }                                                                                                              \
        const int64_t slot = (((int64_t)block * size + place % size) * layer->kv_heads + head) * dim;                  \
        const TYPE *key = (const TYPE *)layer->keys + slot, *value = (const TYPE *)layer->values + slot;               \
        for (int64_t d = 0; d < dim; d++) work->keys[k][d] = WIDEN(key[d]);                                            \
        for (int64_t d = 0; d < dim; d++) work->values[k][d] = WIDEN(value[d]);                                        \
        for (int64_t d = dim; d < padded; d++) work->keys[k][d] = work->values[k][d] = 0.0f;                           \
    }                                                                                                                  \
}                                                                                                                      \
                                                                                                                       \
/* The queries of tokens token … token + count - 1, of the heads that share one KV head. */                            \
static void attend_##NAME(const Step *step, const Layer *layer, int64_t row, int64_t head, int64_t token, int64_t count) \
{                                                                                                                      \
    const int64_t dim = layer->dim, shared = layer->heads / layer->kv_heads, vectors = count * shared;                 \
    const int64_t padded = (dim + LANES - 1) / LANES * LANES;                                                          \
    Work work;                                                                                                         \
    int64_t nearest = INT64_MAX, last = 0; /* the first position that some window reaches, and the last of all */      \
    for (int64_t v = 0; v < vectors; v++) {                                                                            \
        const int64_t own = step->position[token + v / shared], reach = layer->window ? own - layer->window + 1 : 0;   \
        if (reach < nearest) nearest = reach;                                                                          \
        if (own > last) last = own;                                                                                    \
        const TYPE *from = (const TYPE *)layer->query + (head * shared + v % shared) * layer->query_head               \
            + (token + v / shared) * layer->query_token;                                                               \
        for (int64_t d = 0; d < dim; d++) work.query[v][d] = WIDEN(from[d]) * layer->scale;                            \
        for (int64_t d = dim; d < padded; d++) work.query[v][d] = 0.0f;                                                \
        for (int64_t d = 0; d < padded; d++) work.sum[v][d] = 0.0f;                                                    \
        work.most[v] = -INFINITY;                                                                                      \
        work.total[v] = 0.0f;                                                                                          \
    }                                                                                                                  \
    for (int64_t first = 0; first <= last; first += KEYS) {                                                            \
        if (first + KEYS <= nearest && first >= layer->sinks) { /* go on with the tile that the first window reaches */ \
            first = nearest / KEYS * KEYS - KEYS;                                                                      \
            continue;                                                                                                  \
        }                                                                                                              \
        uint32_t seen[MOST_VECTORS], any = 0;                                                                          \
        for (int64_t i = 0; i < count; i++) any |= seen[i] = visible(step, layer, token + i, first);                   \
        const int is_common = first + KEYS <= step->base_len[row]; /* all see the same keys, or none */                \
        if (is_common && any) load_##NAME(&work, step, layer, row, head, token, first, any, padded);                   \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            if (!seen[i]) continue;                                                                                    \
            if (!is_common) load_##NAME(&work, step, layer, row, head, token + i, first, seen[i], padded);             \
            for (int64_t s = 0; s < shared; s++) weigh(&work, i * shared + s, seen[i], padded);                        \
        }                                                                                                              \
    }                                                                                                                  \
    for (int64_t v = 0; v < vectors; v++) {                                                                            \
        TYPE *to = (TYPE *)layer->output + ((token + v / shared) * layer->heads + head * shared + v % shared) * dim;   \
        const float share = 1.0f / work.total[v];                                                                      \
        for (int64_t d = 0; d < dim; d++) to[d] = NARROW(work.sum[v][d] * share);                                      \
    }                                                                                                                  \
}                                                                                                                      \
                                                                                                                       \
void pilotfish_item_##NAME(const Step *step, const Layer *layer, const int64_t *item_of, int64_t item)                 \
{                                                                                                                      \
    int64_t row = 0;                                                                                                   \
    while (item_of[row + 1] <= item) row++;                                                                            \
    const int64_t part = (item - item_of[row]) / layer->kv_heads, head = (item - item_of[row]) % layer->kv_heads;      \
    const int64_t tile = tokens_per_item(layer), token = step->first_token[row] + part * tile;                         \
    const int64_t left = step->first_token[row + 1] - token;                                                           \
    attend_##NAME(step, layer, row, head, token, left < tile ? left : tile);                                           \
}                                                                                                                      \
                                                                                                                       \
void pilotfish_attend_##NAME(const Step *step, const Layer *layer)                                                     \
{                                                                                                                      \
    int64_t item_of[step->rows + 1];                                                                                   \
    const int64_t items = pilotfish_items(step, layer, item_of);                                                       \
    for (int64_t token = 0; token < step->tokens; token++) pilotfish_store_##NAME(step, layer, token);                 \
    _Pragma("omp parallel for schedule(dynamic, 1) if (items > 1)")                                                    \
    for (int64_t item = 0; item < items; item++) pilotfish_item_##NAME(step, layer, item_of, item);                    \
}

#define AS_IT_IS(value) (value)

DEFINE(bfloat16, uint16_t, widen_bfloat16, narrow_bfloat16, finite_bfloat16)
DEFINE(float32, float, AS_IT_IS, AS_IT_IS, finite_float32)
