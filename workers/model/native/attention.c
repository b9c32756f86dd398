/* Paged attention for ragged rows of committed tokens and token trees, on CPU.

   One call serves all rows of a step in one layer. It stores the fresh keys and values, then lets every query attend
   to the stored positions it sees: the committed ones up to itself (within its window, or among the sinks), and, for
   a node of a tree, its ancestors. Keys are taken in tiles of sixteen, read straight from the pool's blocks; the
   softmax is computed while reading (Milakov and Gimelshein 2018; Dao et al. 2022), in single precision.

   Work is divided by row, KV head and tile of queries; the order of summation within a query depends on its own
   positions alone, so neither the batch nor the number of threads changes a bit of the result. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define KEYS 16         /* keys per tile: one vector of floats */
#define LANES 16        /* floats that are summed side by side */
#define QUERIES 24      /* query vectors per item of work, about */
#define MOST_VECTORS 64 /* query vectors per item at most: heads that share a KV head */
#define MOST_DIM 256    /* largest head dimension */

typedef struct {
    int64_t rows, tokens, block_size, most_blocks, tree_words;
    const int32_t *blocks;      /* [tables, rows, most_blocks], negative where nothing is kept */
    const int64_t *slots;       /* [tables, tokens] where each token's key and value are stored */
    const int32_t *first_token; /* [rows + 1] */
    const int32_t *stored_len;  /* [rows] positions stored before this step */
    const int32_t *base_len;    /* [rows] committed positions, this step's included */
    const int32_t *position;    /* [tokens] absolute; nodes of one depth share theirs */
    const uint64_t *ancestors;  /* [tokens, tree_words] for a node: a bit per node it sees, itself included */
} Step;

typedef struct {
    const void *query, *key, *value; /* [heads, tokens, dim], contiguous in dim alone */
    void *output;                    /* [tokens, heads, dim] */
    void *keys, *values;             /* [blocks, block_size, kv_heads, dim] */
    int64_t query_head, query_token, key_head, key_token, value_head, value_token; /* strides, in elements */
    int64_t heads, kv_heads, dim, table;
    int64_t window, sinks; /* a window of 0 is none */
    float scale;
} Layer;

/* e^x for x <= 0, within two units in the last place; very small results become 0. */
static inline float exponential(float x)
{
    float bounded = x < -87.0f ? -87.0f : x;
    float n = rintf(bounded * 1.44269504f);
    float r = fmaf(n, -0.693359375f, bounded);
    r = fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(p, r * r, r + 1.0f);
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}

static inline float widen_bfloat16(uint16_t value)
{
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

static inline uint16_t narrow_bfloat16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16); /* to the nearest, ties to even */
}

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
static inline uint32_t visible(const Step *step, const Layer *layer, int64_t row, int64_t token, int64_t first, int64_t end)
{
    const int64_t base = step->base_len[row], own = step->position[token];
    const int64_t first_node = step->first_token[row] + base - step->stored_len[row];
    const int is_node = token >= first_node;
    const int64_t last = is_node ? end - 1 : own; /* a committed token sees itself and what is before it */
    uint32_t seen = 0;
    for (int k = 0; k < KEYS && first + k <= last; k++) {
        const int64_t at = first + k;
        int64_t place = at; /* the position that counts for the window */
        if (at >= base) {
            const int64_t node = at - base;
            if (!((step->ancestors[token * step->tree_words + node / 64] >> (node % 64)) & 1)) continue;
            place = step->position[first_node + node];
        }
        if (layer->window && own - place >= layer->window && place >= layer->sinks) continue;
        seen |= 1u << k;
    }
    return seen;
}

#define DEFINE(NAME, TYPE, WIDEN, NARROW, FINITE)                                                                     \
                                                                                                                      \
static void store_##NAME(const Step *step, const Layer *layer, int64_t token)                                         \
{                                                                                                                     \
    const int64_t dim = layer->dim;                                                                                   \
    const int64_t slot = step->slots[layer->table * step->tokens + token] * layer->kv_heads;                          \
    for (int64_t head = 0; head < layer->kv_heads; head++) {                                                          \
        const TYPE *key = (const TYPE *)layer->key + head * layer->key_head + token * layer->key_token;               \
        const TYPE *value = (const TYPE *)layer->value + head * layer->value_head + token * layer->value_token;       \
        TYPE *to_key = (TYPE *)layer->keys + (slot + head) * dim, *to_value = (TYPE *)layer->values + (slot + head) * dim;\
        for (int64_t d = 0; d < dim; d++) to_key[d] = FINITE(key[d]);                                                 \
        for (int64_t d = 0; d < dim; d++) to_value[d] = FINITE(value[d]);                                             \
    }                                                                                                                 \
}                                                                                                                     \
                                                                                                                      \
/* The queries of tokens token … token + count - 1, of the heads that share one KV head. */                           \
static void attend_##NAME(const Step *step, const Layer *layer, int64_t row, int64_t head, int64_t token, int64_t count)\
{                                                                                                                     \
    const int64_t dim = layer->dim, shared = layer->heads / layer->kv_heads, vectors = count * shared;                \
    const int64_t size = step->block_size;                                                                            \
    const int32_t *blocks = step->blocks + (layer->table * step->rows + row) * step->most_blocks;                     \
    const int64_t tokens_end = step->first_token[row + 1];                                                            \
    const int64_t end = step->stored_len[row] + tokens_end - step->first_token[row];                                  \
    float query[MOST_VECTORS][MOST_DIM], sum[MOST_VECTORS][MOST_DIM], most[MOST_VECTORS], total[MOST_VECTORS];        \
    const int64_t padded = (dim + LANES - 1) / LANES * LANES; float keys[KEYS][MOST_DIM], values[KEYS][MOST_DIM];     \
    int64_t nearest = INT64_MAX; /* the first position that some query's window reaches */                            \
    for (int64_t i = 0; i < count; i++) {                                                                             \
        const int64_t reach = layer->window ? step->position[token + i] - layer->window + 1 : 0;                      \
        if (reach < nearest) nearest = reach;                                                                         \
        for (int64_t s = 0; s < shared; s++) {                                                                        \
            const int64_t v = i * shared + s;                                                                         \
            const TYPE *from = (const TYPE *)layer->query + (head * shared + s) * layer->query_head                   \
                + (token + i) * layer->query_token;                                                                   \
            for (int64_t d = 0; d < dim; d++) query[v][d] = WIDEN(from[d]) * layer->scale;                            \
            for (int64_t d = 0; d < padded; d++) sum[v][d] = 0.0f;                                                    \
            for (int64_t d = dim; d < padded; d++) query[v][d] = 0.0f;                                                \
            most[v] = -INFINITY;                                                                                      \
            total[v] = 0.0f;                                                                                          \
        }                                                                                                             \
    }                                                                                                                 \
    for (int64_t first = 0; first < end; first += KEYS) {                                                             \
        if (first + KEYS <= nearest && first >= layer->sinks) { /* before every window: go on where the first begins */\
            first = nearest / KEYS * KEYS - KEYS;                                                                     \
            continue;                                                                                                 \
        }                                                                                                             \
        uint32_t seen[MOST_VECTORS], any = 0;                                                                         \
        for (int64_t i = 0; i < count; i++) any |= seen[i] = visible(step, layer, row, token + i, first, end);        \
        if (!any) continue;                                                                                           \
        for (int k = 0; k < KEYS; k++) {                                                                              \
            const int64_t at = first + k;                                                                             \
            const int32_t block = at < end ? blocks[at / size] : -1;                                                  \
            if (block < 0 || !((any >> k) & 1)) {                                                                     \
                for (int64_t d = 0; d < padded; d++) keys[k][d] = values[k][d] = 0.0f;                                \
                continue;                                                                                             \
            }                                                                                                         \
            const int64_t slot = (((int64_t)block * size + at % size) * layer->kv_heads + head) * dim;                \
            const TYPE *key = (const TYPE *)layer->keys + slot, *value = (const TYPE *)layer->values + slot;          \
            for (int64_t d = 0; d < dim; d++) keys[k][d] = WIDEN(key[d]);                                             \
            for (int64_t d = 0; d < dim; d++) values[k][d] = WIDEN(value[d]);                                         \
            for (int64_t d = dim; d < padded; d++) keys[k][d] = values[k][d] = 0.0f;                                  \
        }                                                                                                             \
        for (int64_t v = 0; v < vectors; v++) {                                                                       \
            const uint32_t mask = seen[v / shared];                                                                   \
            if (!mask) continue;                                                                                      \
            float weight[KEYS], largest = most[v], added = 0.0f;                                                      \
            for (int k = 0; k < KEYS; k++) {                                                                          \
                float part[LANES] = {0}, dot = 0.0f;                                                                  \
                for (int64_t d = 0; d < padded; d += LANES)                                                           \
                    for (int l = 0; l < LANES; l++) part[l] += query[v][d + l] * keys[k][d + l];                      \
                for (int l = 0; l < LANES; l++) dot += part[l];                                                       \
                weight[k] = dot;                                                                                      \
            }                                                                                                         \
            for (int k = 0; k < KEYS; k++) weight[k] = (mask >> k) & 1 ? weight[k] : -INFINITY;                       \
            for (int k = 0; k < KEYS; k++) largest = weight[k] > largest ? weight[k] : largest;                       \
            for (int k = 0; k < KEYS; k++) weight[k] = exponential(weight[k] - largest);                              \
            for (int k = 0; k < KEYS; k++) added += weight[k];                                                        \
            const float kept = exponential(most[v] - largest);                                                        \
            total[v] = total[v] * kept + added;                                                                       \
            most[v] = largest;                                                                                        \
                                                                                                                      \
            for (int64_t d = 0; d < padded; d += LANES) {                                                             \
                float part[LANES];                                                                                    \
                for (int l = 0; l < LANES; l++) part[l] = sum[v][d + l] * kept;                                       \
                for (int k = 0; k < KEYS; k++)                                                                        \
                    for (int l = 0; l < LANES; l++) part[l] += weight[k] * values[k][d + l];                          \
                for (int l = 0; l < LANES; l++) sum[v][d + l] = part[l];                                              \
            }                                                                                                         \
        }                                                                                                             \
    }                                                                                                                 \
    for (int64_t v = 0; v < vectors; v++) {                                                                           \
        TYPE *to = (TYPE *)layer->output + ((token + v / shared) * layer->heads + head * shared + v % shared) * dim;  \
        const float share = 1.0f / total[v];                                                                          \
        for (int64_t d = 0; d < dim; d++) to[d] = NARROW(sum[v][d] * share);                                          \
    }                                                                                                                 \
}                                                                                                                     \
                                                                                                                      \
void pilotfish_attend_##NAME(const Step *step, const Layer *layer)                                                    \
{                                                                                                                     \
    const int64_t shared = layer->heads / layer->kv_heads;                                                            \
    const int64_t tile = shared >= QUERIES ? 1 : QUERIES / shared;                                                    \
    for (int64_t token = 0; token < step->tokens; token++) store_##NAME(step, layer, token);                          \
    int64_t items = 0, item_of[step->rows + 1];                                                                       \
    for (int64_t row = 0; row < step->rows; row++) {                                                                  \
        item_of[row] = items;                                                                                         \
        items += (step->first_token[row + 1] - step->first_token[row] + tile - 1) / tile * layer->kv_heads;           \
    }                                                                                                                 \
    item_of[step->rows] = items;                                                                                      \
    _Pragma("omp parallel for schedule(dynamic, 1) if (items > 1)")                                                   \
    for (int64_t item = 0; item < items; item++) {                                                                    \
        int64_t row = 0;                                                                                              \
        while (item_of[row + 1] <= item) row++;                                                                       \
        const int64_t part = (item - item_of[row]) / layer->kv_heads, head = (item - item_of[row]) % layer->kv_heads; \
        const int64_t token = step->first_token[row] + part * tile, left = step->first_token[row + 1] - token;        \
        attend_##NAME(step, layer, row, head, token, left < tile ? left : tile);                                      \
    }                                                                                                                 \
}

#define AS_IT_IS(value) (value)

DEFINE(bfloat16, uint16_t, widen_bfloat16, narrow_bfloat16, finite_bfloat16)
DEFINE(float32, float, AS_IT_IS, AS_IT_IS, finite_float32)
