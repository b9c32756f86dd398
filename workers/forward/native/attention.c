/* Paged attention for ragged rows of committed tokens and token trees, on CPU.

   Two calls serve all rows of a step in one layer. The first stores the new keys and values. The second lets every
   query attend to the positions that it sees: the committed ones up to its own (inside its window, or among the
   sinks), and, for a node of a tree, its ancestors. Keys are processed in tiles of as many positions as two vectors
   have lanes. A tile is read from the pool's blocks and transposed, so that each lane accumulates the product with
   one key. The softmax is computed online (Milakov and Gimelshein 2018; Dao et al. 2022), in single precision.

   Work is divided by row, by tile of queries and, if there is little work, by KV head: heads are adjacent in the pool,
   so it is faster to read all of them together. A query's sums run over its own positions in order, in tiles that
   begin at fixed positions. So no bit of the result depends on the batch, the number of threads, or the position of a
   token inside a tree. */

#include <omp.h>

#include "attention.h"
#include "positions.h"

#define GROUP (REGISTERS / 8) /* query vectors per reading of keys and values */
#define CHAINS 2        /* independent partial sums per product */
#define WIDTH 4         /* vectors of a value that are accumulated together */
#define QUERIES 48      /* approximate number of query vectors of one KV head per item of work */
#define LEAST_QUERIES 12 /* items are not divided further: each reads all keys and values */
#define MOST_VECTORS 64 /* most query heads per KV head */
#define MOST_LATENT 576 /* largest dimension of a key that holds its value */
#define MOST_STATES 256 /* query vectors per item, of all its KV heads */
#define ITEMS 4         /* items per thread, because items take unequal time */

typedef struct {
    int64_t padded, value_padded;                 /* numbers of a key and of a value, to full vectors */
    ALIGNED float query[MOST_VECTORS * MOST_DIM]; /* [vectors, padded] */
    ALIGNED float sum[MOST_VECTORS * MOST_DIM];   /* [vectors, padded] weighted sums of the values so far */
    float most[MOST_STATES];
    ALIGNED Vector total[MOST_STATES];            /* sums of the weights, by lane */
    ALIGNED float weight[GROUP * KEYS];           /* weights of the tile's positions */
    ALIGNED float keys[MOST_LATENT * KEYS];       /* [padded, KEYS], or pairs of bfloat16 numbers [dim / 2, KEYS] */
    ALIGNED float values[KEYS * MOST_LATENT];     /* [KEYS, padded], where they cannot be read as they are stored */
    const void *value[KEYS];                      /* [padded] each */
    ALIGNED float key_scale[KEYS], value_scale[KEYS]; /* of 8-bit keys and values; 0 where there are none */
    int64_t has_slopes;
    float slope[MOST_STATES], own[MOST_STATES];   /* of ALiBi, and the position of each query vector */
    ALIGNED float place[KEYS];                    /* the tile's positions */
} Work;

/* How a tile's keys and values lie in the working memory. SINGLE: in single precision. AS_STORED: pairs of bfloat16
   numbers, and values in the pool, which are widened when they are used; cheaper if one group of query vectors uses them.
   The same for 8-bit numbers, whose keys are always widened: products and weights are multiplied with their scales. */
enum { SINGLE, AS_STORED, SCALED_SINGLE, INT8_AS_STORED, E4M3_AS_STORED };
#define HAS_SCALES(FORM) ((FORM) >= SCALED_SINGLE)
#define HAS_8_BITS(KIND) ((KIND) == INT8 || (KIND) == E4M3)

/* NaN and infinity are stored as finite numbers: the next sequence that gets the block may read it, masked. */
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

#define LARGEST_INT8 127.0f /* the bounds of workers/kv/eight_bits.py */
#define LARGEST_E4M3 448.0f
#define BOUND 3e38f
#define LEAST 1e-30f

/* Quantize one head's numbers, of the layer's kind of queries and from index `at` on, to numbers of `kind`. */
INLINE void quantize_head(const Layer *layer, const void *from, int64_t at, const int kind, uint8_t *to, float *scale)
{
    const int64_t dim = layer->dim;
    float number[MOST_LATENT], most = LEAST;
    for (int64_t d = 0; d < dim; d++) {
        const float x = layer->query_kind == BFLOAT16 ? widen_bfloat16(((const uint16_t *)from)[at + d]) : ((const float *)from)[at + d];
        const float some = x == x ? x : 0.0f, upper = some < BOUND ? some : BOUND;
        number[d] = upper > -BOUND ? upper : -BOUND;
        const float size = fabsf(number[d]);
        most = size > most ? size : most;
    }
    const float factor = most * (kind == INT8 ? 1.0f / LARGEST_INT8 : 1.0f / LARGEST_E4M3);
    for (int64_t d = 0; d < dim; d++)
        to[d] = kind == INT8 ? (uint8_t)(int8_t)rintf(number[d] / factor) : narrow_e4m3(number[d] / factor);
    *scale = factor;
}

static inline float most_of_lanes(Vector first, Vector second)
{
#if defined(IS_AVX512)
    return _mm512_reduce_max_ps(_mm512_max_ps((__m512)first, (__m512)second));
#else
    float most = first[0];
    for (int l = 0; l < LANES; l++) most = first[l] > most ? first[l] : most;
    for (int l = 0; l < LANES; l++) most = second[l] > most ? second[l] : most;
    return most;
#endif
}

static inline Vector even_of_pairs(Words pairs)
{
    return (Vector)(pairs << 16);
}

static inline Vector odd_of_pairs(Words pairs)
{
    return (Vector)(pairs & 0xffff0000u);
}

/* The same in single precision: the pairs are separated. */
static inline void transpose_and_widen(const uint16_t *const *keys, int64_t from, float *to)
{
    ALIGNED float columns[LANES * KEYS];
    transpose_pairs(keys, from, columns);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        const Words column = *(const Words *)(columns + i * KEYS);
        *(Vector *)(to + 2 * i * KEYS) = even_of_pairs(column);
        *(Vector *)(to + (2 * i + 1) * KEYS) = odd_of_pairs(column);
    }
}

/* A vector of stored numbers, in single precision. */
static inline Vector full_float32(const float *from)
{
    return *(const Vector *)from;
}

static inline Vector full_bfloat16(const uint16_t *from)
{
#if defined(IS_AVX512)
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return (Vector)_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
#elif defined(IS_AVX2)
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    return (Vector)_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
#else
    Vector wide;
    for (int l = 0; l < LANES; l++) wide[l] = widen_bfloat16(from[l]);
    return wide;
#endif
}

static inline Vector full_int8(const int8_t *from)
{
#if defined(IS_AVX512)
    return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(IS_AVX2)
    return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    Vector wide;
    for (int l = 0; l < LANES; l++) wide[l] = from[l];
    return wide;
#endif
}

/* Divided by 256, by which `load_e4m3` multiplies the scales. */
static inline Vector full_e4m3(const uint8_t *from)
{
    return widen_e4m3s(from);
}

/* Makes the compiler keep a vector in a register instead of reading it again for each use. */
#if defined(IS_AVX512) || defined(IS_AVX2)
#define IN_REGISTERS(VECTOR) __asm__("" : "+v"(VECTOR))
#else
#define IN_REGISTERS(VECTOR) (void)0
#endif

/* A key's part of a tile for `halves` halves of it: its numbers d and d + 1. */
INLINE void read_keys(const Work *work, int64_t d, const int form, const int halves, Vector even[HALVES], Vector odd[HALVES])
{
#pragma GCC unroll 2
    for (int h = 0; h < halves; h++) {
        if (form == AS_STORED) {
            const Words pairs = *(const Words *)(work->keys + d / 2 * KEYS + h * LANES);
            even[h] = even_of_pairs(pairs), odd[h] = odd_of_pairs(pairs);
        } else {
            even[h] = *(const Vector *)(work->keys + d * KEYS + h * LANES);
            odd[h] = *(const Vector *)(work->keys + (d + 1) * KEYS + h * LANES);
        }
        IN_REGISTERS(even[h]);
        IN_REGISTERS(odd[h]);
    }
}

/* The weights of the first `halves` halves of a tile for the `count` query vectors `which`, into `work->weight`. Rescales
   what the vectors have summed so far. The sum of a product's even numbers and that of its odd ones are independent. */
INLINE void weigh_tile(Work *work, const int64_t *which, const uint32_t *seen, const int count, const int form, const int halves)
{
    const int64_t padded = work->padded;
    Vector part[GROUP][CHAINS][HALVES];
#pragma GCC unroll 4
    for (int g = 0; g < count; g++)
#pragma GCC unroll 2
        for (int c = 0; c < CHAINS; c++) part[g][c][0] = part[g][c][1] = (Vector){0};
    for (int64_t d = 0; d < padded; d += CHAINS) {
        Vector even[HALVES], odd[HALVES];
        read_keys(work, d, form, halves, even, odd);
#pragma GCC unroll 4
        for (int g = 0; g < count; g++) {
            const float *query = work->query + which[g] * padded + d;
#pragma GCC unroll 2
            for (int h = 0; h < halves; h++) {
                part[g][0][h] = fused(even[h], same(query[0]), part[g][0][h]);
                part[g][1][h] = fused(odd[h], same(query[1]), part[g][1][h]);
            }
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < count; g++) {
        const int64_t v = which[g];
        float *weight = work->weight + g * KEYS;
        for (int h = 0; h < HALVES; h++) {
            Vector score = part[g][0][h] + part[g][1][h];
            if (HAS_SCALES(form)) score = fused(score, *(const Vector *)(work->key_scale + h * LANES), (Vector){0});
            if (work->has_slopes)
                score = fused(*(const Vector *)(work->place + h * LANES) - same(work->own[v]), same(work->slope[v]), score);
            *(Vector *)(weight + h * LANES) = score;
        }
        if (seen[g] != ALL)
            for (int k = 0; k < KEYS; k++) weight[k] = (seen[g] >> k) & 1 ? weight[k] : -INFINITY;
        const float tile = most_of_lanes(*(const Vector *)weight, *(const Vector *)(weight + LANES));
        const float most = work->most[v], largest = tile > most ? tile : most;
        const float kept = tile > most ? exponential(most - largest) : 1.0f;
        for (int k = 0; k < halves * LANES; k++) weight[k] = exponential(weight[k] - largest);
        for (int k = halves * LANES; k < KEYS; k++) weight[k] = 0.0f;
        work->most[v] = largest;
        work->total[v] = fused(work->total[v], same(kept), *(const Vector *)weight + *(const Vector *)(weight + LANES));
        for (int k = 0; HAS_SCALES(form) && k < KEYS; k += LANES)
            *(Vector *)(weight + k) *= *(const Vector *)(work->value_scale + k);
        if (kept != 1.0f)
            for (int64_t d = 0; d < work->value_padded; d += LANES) *(Vector *)(work->sum + v * padded + d) *= kept;
    }
}

INLINE Vector read_value(const Work *work, int k, int64_t at, const int form)
{
    return form == AS_STORED        ? full_bfloat16((const uint16_t *)work->value[k] + at)
           : form == INT8_AS_STORED ? full_int8((const int8_t *)work->value[k] + at)
           : form == E4M3_AS_STORED ? full_e4m3((const uint8_t *)work->value[k] + at)
                                    : full_float32((const float *)work->value[k] + at);
}

/* Add `width` vectors of the first `keys` weighted values, from number d on, to the sums. */
INLINE void add_values(Work *work, const int64_t *which, int keys, int64_t d, const int count, const int form, const int width)
{
    const int64_t padded = work->padded;
    Vector sum[GROUP][WIDTH];
#pragma GCC unroll 4
    for (int g = 0; g < count; g++)
#pragma GCC unroll 4
        for (int w = 0; w < width; w++) sum[g][w] = *(const Vector *)(work->sum + which[g] * padded + d + w * LANES);
#pragma GCC unroll 1
    for (int k = 0; k < keys; k++) {
        Vector value[WIDTH];
#pragma GCC unroll 4
        for (int w = 0; w < width; w++) {
            value[w] = read_value(work, k, d + w * LANES, form);
            if (form != SINGLE && form != SCALED_SINGLE) IN_REGISTERS(value[w]);
        }
#pragma GCC unroll 4
        for (int g = 0; g < count; g++)
#pragma GCC unroll 4
            for (int w = 0; w < width; w++) sum[g][w] = fused(value[w], same(work->weight[g * KEYS + k]), sum[g][w]);
    }
#pragma GCC unroll 4
    for (int g = 0; g < count; g++)
#pragma GCC unroll 4
        for (int w = 0; w < width; w++) *(Vector *)(work->sum + which[g] * padded + d + w * LANES) = sum[g][w];
}

/* Add the first `keys` keys and values of a tile to the running softmax of the `count` query vectors `which`. `seen`: the
   positions that each vector sees, at least one, none after the first `keys`. The order of a vector's sums does not depend
   on the other vectors; a position that it does not see adds zero. */
INLINE void accumulate_tile(Work *work, const int64_t *which, const uint32_t *seen, int keys, const int count, const int form)
{
    const int64_t padded = work->value_padded;
    if (keys > LANES) weigh_tile(work, which, seen, count, form, 2);
    else weigh_tile(work, which, seen, count, form, 1);
    for (int64_t d = 0; d < padded; d += WIDTH * LANES) {
        const int64_t width = (padded - d) / LANES;
        if (width >= 4) add_values(work, which, keys, d, count, form, 4);
        else if (width == 3) add_values(work, which, keys, d, count, form, 3);
        else if (width == 2) add_values(work, which, keys, d, count, form, 2);
        else add_values(work, which, keys, d, count, form, 1);
    }
}

/* `accumulate_tile` for any number of query vectors. */
INLINE void accumulate_form(Work *work, const int64_t *which, const uint32_t *seen, int keys, int64_t count, const int form)
{
    for (; count >= GROUP; count -= GROUP, which += GROUP, seen += GROUP) accumulate_tile(work, which, seen, keys, GROUP, form);
    if (GROUP > 3 && count == 3) accumulate_tile(work, which, seen, keys, 3, form);
    else if (GROUP > 2 && count == 2) accumulate_tile(work, which, seen, keys, 2, form);
    else if (count == 1) accumulate_tile(work, which, seen, keys, 1, form);
}

static void accumulate_all(Work *work, const int64_t *which, const uint32_t *seen, int keys, int64_t count, int form)
{
    if (form == AS_STORED) accumulate_form(work, which, seen, keys, count, AS_STORED);
    else if (form == INT8_AS_STORED) accumulate_form(work, which, seen, keys, count, INT8_AS_STORED);
    else if (form == E4M3_AS_STORED) accumulate_form(work, which, seen, keys, count, E4M3_AS_STORED);
    else if (form == SCALED_SINGLE) accumulate_form(work, which, seen, keys, count, SCALED_SINGLE);
    else accumulate_form(work, which, seen, keys, count, SINGLE);
}

/* Prefetch the keys and values of a row's committed positions first … end - 1, of all heads, `bytes` of each, to the second-level cache: the
   processor's own prefetcher follows a block, but not a row from block to block. */
static void prefetch_positions(const Step *step, const Layer *layer, int64_t row, int64_t first, int64_t end, int64_t bytes)
{
    const int64_t size = step->block_size;
    const int32_t *blocks = step->blocks + (layer->table * step->rows + row) * step->most_blocks;
    end = end < step->base_len[row] ? end : step->base_len[row];
    for (int64_t at = first, some; at < end; at += some) {
        const int64_t within = at % size, from = (blocks[at / size] * size + within) * bytes;
        some = size - within < end - at ? size - within : end - at;
        if (blocks[at / size] < 0) continue; /* it left the window */
        for (int64_t byte = 0; byte < some * bytes; byte += LINE) {
            __builtin_prefetch((const char *)layer->keys + from + byte, 0, 2);
            if (!layer->latent) __builtin_prefetch((const char *)layer->values + from + byte, 0, 2);
        }
    }
}

static inline int64_t padded_dim(const Layer *layer)
{
    return (layer->dim + LANES - 1) / LANES * LANES;
}

static inline int64_t value_dim(const Layer *layer)
{
    return layer->latent ? layer->latent : layer->dim;
}

static inline int64_t tokens_per_item(const Layer *layer, int64_t on_tiles)
{
    const int64_t shared = layer->heads / layer->kv_heads, fit = MOST_VECTORS * MOST_DIM / padded_dim(layer);
    const int64_t most = on_tiles ? MOST_ON_TILES : fit < QUERIES ? fit : QUERIES;
    return shared >= most ? 1 : most / shared;
}

/* KV heads that store keys and values of their own. */
static inline int64_t stored_heads(const Layer *layer)
{
    return layer->latent ? 1 : layer->kv_heads;
}

/* The number of KV heads whose queries fit into one item. */
static inline int64_t heads_that_fit(const Layer *layer, const Items *items)
{
    const int64_t vectors = items->tokens * (layer->heads / layer->kv_heads);
    const int64_t floats = MOST_VECTORS * MOST_DIM / (vectors * padded_dim(layer)), states = MOST_STATES / vectors;
    const int64_t heads = items->on_tiles ? MOST_ON_TILES / vectors : floats < states ? floats : states;
    return heads < layer->kv_heads ? heads : layer->kv_heads;
}

/* The number of tiles of `tokens` tokens. Fills `first`. */
static int64_t divide_rows(const Step *step, int64_t tokens, int64_t *first)
{
    int64_t tiles = 0;
    for (int64_t row = 0; row < step->rows; row++) {
        first[row] = tiles;
        tiles += (step->first_token[row + 1] - step->first_token[row] + tokens - 1) / tokens;
    }
    first[step->rows] = tiles;
    return tiles;
}

Items pilotfish_items(const Step *step, const Layer *layer, int64_t kind, int64_t team, int64_t *first)
{
    const int64_t shared = layer->heads / layer->kv_heads, on_tiles = pilotfish_attends_on_tiles(layer, kind);
    Items items = {.first = first, .on_tiles = on_tiles, .tokens = tokens_per_item(layer, on_tiles)};
    int64_t longest = 1;
    for (int64_t row = 0; row < step->rows; row++) {
        const int64_t tokens = step->first_token[row + 1] - step->first_token[row];
        longest = tokens > longest ? tokens : longest;
    }
    if (longest < items.tokens) items.tokens = longest;
    items.tiles = divide_rows(step, items.tokens, first);
    const int64_t enough = on_tiles ? 2 * team : ITEMS * team; /* on tiles, what every item repeats takes longer */
    while (items.tokens > 1 && team > 1 && items.tiles * layer->kv_heads < enough &&
           items.tokens * shared > LEAST_QUERIES) {
        items.tokens = (items.tokens + 1) / 2; /* one tree alone is work for all threads */
        items.tiles = divide_rows(step, items.tokens, first);
    }
    items.heads = team == 1 || items.tiles >= ITEMS * team ? heads_that_fit(layer, &items) : 1;
    items.count = items.tiles * ((layer->kv_heads + items.heads - 1) / items.heads);
    return items;
}

#define DEFINE_STORE(NAME, TYPE, FINITE)                                                                               \
                                                                                                                       \
void pilotfish_store_##NAME(const Step *step, const Layer *layer, int64_t token)                                       \
{                                                                                                                      \
    const int64_t dim = layer->dim;                                                                                    \
    const int64_t slot = step->slots[layer->table * step->tokens + token] * stored_heads(layer);                       \
    for (int64_t head = 0; head < stored_heads(layer); head++) {                                                         \
        const TYPE *key = (const TYPE *)layer->key + head * layer->key_head + token * layer->key_token;                \
        const TYPE *value = (const TYPE *)layer->value + head * layer->value_head + token * layer->value_token;        \
        TYPE *to_key = (TYPE *)layer->keys + (slot + head) * dim;                                                      \
        TYPE *to_value = (TYPE *)layer->values + (slot + head) * dim;                                                  \
        for (int64_t d = 0; d < dim; d++) to_key[d] = FINITE(key[d]);                                                  \
        for (int64_t d = 0; d < dim && !layer->latent; d++) to_value[d] = FINITE(value[d]);                            \
    }                                                                                                                  \
}

/* One token's keys or values in 8 bits are a record: the numbers of all heads, then their scales, padded to 16 bytes. */
static inline int64_t first_scale(const Layer *layer)
{
    return (stored_heads(layer) * layer->dim + 3) / 4 * 4;
}

static inline int64_t record_bytes(const Layer *layer)
{
    return (first_scale(layer) + stored_heads(layer) * (int64_t)sizeof(float) + 15) / 16 * 16;
}

INLINE void store_in_8_bits(const Step *step, const Layer *layer, int64_t token, const int kind)
{
    const int64_t dim = layer->dim, scales = first_scale(layer);
    const int64_t at = step->slots[layer->table * step->tokens + token] * record_bytes(layer);
    uint8_t *keys = (uint8_t *)layer->keys + at, *values = (uint8_t *)layer->values + at;
    for (int64_t head = 0; head < stored_heads(layer); head++) {
        const int64_t key = head * layer->key_head + token * layer->key_token;
        const int64_t value = head * layer->value_head + token * layer->value_token;
        quantize_head(layer, layer->key, key, kind, keys + head * dim, (float *)(keys + scales) + head);
        if (!layer->latent)
            quantize_head(layer, layer->value, value, kind, values + head * dim, (float *)(values + scales) + head);
    }
}

void pilotfish_store_int8(const Step *step, const Layer *layer, int64_t token)
{
    store_in_8_bits(step, layer, token, INT8);
}

void pilotfish_store_e4m3(const Step *step, const Layer *layer, int64_t token)
{
    store_in_8_bits(step, layer, token, E4M3);
}

/* Where the numbers of a slot and a head lie in a pool of the kind, in numbers. */
static inline int64_t number_at(const Layer *layer, int64_t slot, int64_t head, const int kind)
{
    const int64_t own = layer->latent ? 0 : head;
    if (HAS_8_BITS(kind)) return slot * record_bytes(layer) + own * layer->dim;
    return (slot * stored_heads(layer) + own) * layer->dim;
}

/* The scale of a slot and a head; 0 for a slot below 0. */
static inline float scale_at(const Layer *layer, const void *records, int64_t slot, int64_t head)
{
    const char *scales = (const char *)records + slot * record_bytes(layer) + first_scale(layer);
    return slot < 0 ? 0.0f : ((const float *)scales)[layer->latent ? 0 : head];
}

#define DEFINE(NAME, TYPE, KIND)                                                                                       \
                                                                                                                       \
/* A vector of a key or a value of which `count` numbers are left; zeros beyond. */                                    \
static inline Vector take_##NAME(const TYPE *from, int64_t count)                                                      \
{                                                                                                                      \
    if (count >= LANES) return full_##NAME(from);                                                                      \
    TYPE some[LANES] = {0};                                                                                            \
    for (int64_t l = 0; l < count; l++) some[l] = from[l];                                                             \
    return full_##NAME(some);                                                                                          \
}                                                                                                                      \
                                                                                                                       \
static const TYPE nothing_##NAME[MOST_LATENT];                                                                         \
                                                                                                                       \
/* The first `keys` of one head's keys and values of a tile, in the form that suits `vectors` query vectors; zeros where \
   there are none. */                                                                                                  \
static inline int load_##NAME(Work *work, const Layer *layer, int64_t head, const int64_t *slots, int keys, int64_t vectors) \
{                                                                                                                      \
    const int64_t dim = layer->dim, padded = work->padded;                                                             \
    const int is_direct = sizeof(TYPE) == sizeof(float) && dim == padded;                                              \
    const int is_few = vectors <= GROUP && dim % (KIND == BFLOAT16 ? 2 * LANES : LANES) == 0;                          \
    const int as_stored = KIND == INT8 ? INT8_AS_STORED : KIND == E4M3 ? E4M3_AS_STORED : KIND == BFLOAT16 ? AS_STORED : SINGLE; \
    const int form = is_few ? as_stored : HAS_8_BITS(KIND) ? SCALED_SINGLE : SINGLE;                                   \
    const int end = keys > LANES ? KEYS : LANES;                                                                       \
    const TYPE *key[KEYS], *value[KEYS];                                                                               \
    for (int k = 0; k < end; k++) {                                                                                    \
        const int64_t at = number_at(layer, slots[k], head, KIND);                                                     \
        key[k] = slots[k] < 0 ? nothing_##NAME : (const TYPE *)layer->keys + at;                                       \
        value[k] = slots[k] < 0 ? nothing_##NAME : (const TYPE *)layer->values + at;                                   \
        work->value[k] = is_direct || (KIND != FLOAT32 && is_few) ? (const void *)value[k] : work->values + k * padded; \
        for (int64_t d = 0; d < dim; d += LINE / (int64_t)sizeof(TYPE)) __builtin_prefetch(value[k] + d, 0, 3);        \
    }                                                                                                                  \
    const float factor = KIND == E4M3 ? 256.0f : 1.0f;                                                                 \
    for (int k = 0; HAS_8_BITS(KIND) && k < KEYS; k++) {                                                               \
        work->key_scale[k] = k < end ? scale_at(layer, layer->keys, slots[k], head) * factor : 0.0f;                   \
        work->value_scale[k] = k < end ? scale_at(layer, layer->values, slots[k], head) * factor : 0.0f;               \
    }                                                                                                                  \
    int64_t done = 0;                                                                                                  \
    for (; KIND == BFLOAT16 && done + 2 * LANES <= dim; done += 2 * LANES)                                             \
        for (int half = 0; half < end; half += LANES) {                                                                \
            const uint16_t *const *of_half = (const uint16_t *const *)key + half;                                      \
            if (form == AS_STORED) transpose_pairs(of_half, done, work->keys + done / 2 * KEYS + half);                \
            else transpose_and_widen(of_half, done, work->keys + done * KEYS + half);                                  \
        }                                                                                                              \
    for (int64_t d = done; d < padded; d += LANES) {                                                                   \
        for (int half = 0; half < end; half += LANES) {                                                                \
            Vector rows[LANES];                                                                                        \
            _Pragma("GCC unroll 16") for (int k = 0; k < LANES; k++) rows[k] = take_##NAME(key[half + k] + d, dim - d); \
            transpose(rows, KEYS, work->keys + d * KEYS + half);                                                       \
        }                                                                                                              \
    }                                                                                                                  \
    for (int64_t d = 0; d < work->value_padded && !is_direct && (form == SINGLE || form == SCALED_SINGLE); d += LANES) \
        for (int k = 0; k < keys; k++)                                                                                 \
            *(Vector *)(work->values + k * padded + d) = take_##NAME(value[k] + d, dim - d);                           \
    return form;                                                                                                       \
}                                                                                                                      \
/* The queries of tokens token … token + count - 1, of the heads that share the KV heads head … head + heads - 1. */   \
static void attend_##NAME(const Step *step, const Layer *layer, int64_t row, int64_t head, int64_t heads, int64_t token, \
                          int64_t count)                                                                               \
{                                                                                                                      \
    const int64_t dim = layer->dim, shared = layer->heads / layer->kv_heads, vectors = count * shared;                 \
    const int64_t padded = padded_dim(layer), of_value = value_dim(layer);                                             \
    Work work;                                                                                                         \
    work.padded = padded, work.value_padded = (of_value + LANES - 1) / LANES * LANES;                                  \
    work.has_slopes = layer->slopes != NULL;                                                                           \
    int64_t nearest = INT64_MAX, last = 0; /* the first position that some window reaches, and the last of all */      \
    for (int64_t v = 0; v < heads * vectors; v++) { /* head by head, token by token */                                 \
        const int64_t of = (head + v / vectors) * shared + v % shared, at = token + v % vectors / shared;              \
        const int64_t own = step->position[at], reach = layer->window ? own - layer->window + 1 : 0;                   \
        if (reach < nearest) nearest = reach;                                                                          \
        if (own > last) last = own;                                                                                    \
        const int64_t from = of * layer->query_head + at * layer->query_token;                                         \
        for (int64_t d = 0; d < dim; d++) work.query[v * padded + d] = query_at(layer, from + d) * layer->scale;       \
        for (int64_t d = dim; d < padded; d++) work.query[v * padded + d] = 0.0f;                                      \
        for (int64_t d = 0; d < work.value_padded; d++) work.sum[v * padded + d] = 0.0f;                               \
        work.most[v] = -INFINITY;                                                                                      \
        work.slope[v] = layer->slopes ? layer->slopes[of] : 0.0f, work.own[v] = (float)own;                            \
        work.total[v] = (Vector){0};                                                                                   \
    }                                                                                                                  \
    for (int64_t first = 0; first <= last; first += KEYS) {                                                            \
        if (first + KEYS <= nearest && first >= layer->sinks) { /* go on with the tile that the first window reaches */ \
            first = nearest / KEYS * KEYS - KEYS;                                                                      \
            continue;                                                                                                  \
        }                                                                                                              \
        for (int k = 0; k < KEYS; k++) work.place[k] = (float)(first + k);                                             \
        int64_t which[MOST_VECTORS], some = 0;                                                                         \
        uint32_t seen[MOST_VECTORS], any = 0;                                                                          \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            const uint32_t own = visible(step, layer, token + i, first);                                               \
            any |= own;                                                                                                \
            for (int64_t s = 0; own && s < shared; s++, some++) which[some] = i * shared + s, seen[some] = own;        \
        }                                                                                                              \
        const int is_common = first + KEYS <= step->base_len[row]; /* all see the same keys, or none */                \
        int64_t slots[KEYS];                                                                                           \
        const int keys = last_seen(any);                                                                               \
        if (is_common) locate(step, layer, row, token, first, any, slots);                                             \
        const int64_t ahead = first + 2 * KEYS <= last ? first + 2 * KEYS : last + 1;                                  \
        prefetch_positions(step, layer, row, first ? first + KEYS : 0, ahead, number_at(layer, 1, 0, KIND) * (int64_t)sizeof(TYPE)); \
        for (int64_t h = 0; h < heads && some; h++) {                                                                  \
            if (is_common) {                                                                                           \
                const int form = load_##NAME(&work, layer, head + h, slots, keys, some);                               \
                accumulate_all(&work, which, seen, keys, some, form);                                                  \
            } else                                                                                                     \
                for (int64_t from = 0; from < some; from += shared) {                                                  \
                    const int own = last_seen(seen[from]);                                                             \
                    locate(step, layer, row, token + which[from] % vectors / shared, first, seen[from], slots);        \
                    const int form = load_##NAME(&work, layer, head + h, slots, own, shared);                          \
                    accumulate_all(&work, which + from, seen + from, own, shared, form);                               \
                }                                                                                                      \
            for (int64_t i = 0; i < some; i++) which[i] += vectors;                                                    \
        }                                                                                                              \
    }                                                                                                                  \
    for (int64_t v = 0; v < heads * vectors; v++) {                                                                    \
        const int64_t of = (head + v / vectors) * shared + v % shared, at = token + v % vectors / shared;              \
        const float share = 1.0f / sum_of_lanes(work.total[v]);                                                        \
        for (int64_t d = 0; d < of_value; d++) work.sum[v * padded + d] *= share;                                      \
        put(layer->output, layer->output_kind, (at * layer->heads + of) * of_value, work.sum + v * padded, of_value);  \
    }                                                                                                                  \
}                                                                                                                      \
                                                                                                                       \
void pilotfish_item_##NAME(const Step *step, const Layer *layer, const Items *items, int64_t item)                     \
{                                                                                                                      \
    const int64_t tile = item % items->tiles, head = item / items->tiles * items->heads;                               \
    const int64_t heads = layer->kv_heads - head < items->heads ? layer->kv_heads - head : items->heads;               \
    int64_t row = 0;                                                                                                   \
    while (items->first[row + 1] <= tile) row++;                                                                       \
    const int64_t most = items->tokens, token = step->first_token[row] + (tile - items->first[row]) * most;            \
    const int64_t left = step->first_token[row + 1] - token;                                                           \
    if (items->on_tiles) pilotfish_attend_on_tiles(step, layer, row, head, heads, token, left < most ? left : most);   \
    else attend_##NAME(step, layer, row, head, heads, token, left < most ? left : most);                               \
}                                                                                                                      \
                                                                                                                       \
void pilotfish_write_##NAME(const Step *step, const Layer *layer)                                                      \
{                                                                                                                      \
    for (int64_t token = 0; token < step->tokens; token++) pilotfish_store_##NAME(step, layer, token);                 \
}                                                                                                                      \
                                                                                                                       \
void pilotfish_attend_##NAME(const Step *step, const Layer *layer)                                                     \
{                                                                                                                      \
    int64_t first[step->rows + 1];                                                                                     \
    const Items items = pilotfish_items(step, layer, KIND, omp_get_max_threads(), first);                              \
    _Pragma("omp parallel for schedule(dynamic, 1) if (items.count > 1)")                                              \
    for (int64_t item = 0; item < items.count; item++) pilotfish_item_##NAME(step, layer, &items, item);               \
}

DEFINE_STORE(bfloat16, uint16_t, finite_bfloat16)
DEFINE_STORE(float32, float, finite_float32)
DEFINE(bfloat16, uint16_t, BFLOAT16)
DEFINE(float32, float, FLOAT32)
DEFINE(int8, int8_t, INT8)
DEFINE(e4m3, uint8_t, E4M3)
