/* The interface of the attention kernel for the decoder. See attention.c. */

#ifndef PILOTFISH_ATTENTION_H
#define PILOTFISH_ATTENTION_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Vectors are as wide as the processor's registers, and the number of sums fits its registers: spilled sums would make
   every product slower by an order of magnitude. Other widths than the processor's own are correct, but slow. */
#if !defined(LANES) && defined(__AVX512F__)
#define LANES 16    /* floats of a vector */
#define REGISTERS 32
#elif !defined(LANES)
#define LANES 8
#define REGISTERS 16
#endif

#if defined(__AVX512F__) && LANES == 16
#define IS_AVX512 1
#elif defined(__AVX2__) && LANES == 8
#define IS_AVX2 1
#endif
#define LINE 64     /* bytes of a cache line */

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4)));

enum { FLOAT32, BFLOAT16, INT8 }; /* kinds of numbers */

typedef struct {
    int64_t rows, tokens, block_size, most_blocks, most_depth;
    const int32_t *blocks;      /* [tables, rows, most_blocks], negative for a block that left the window */
    const int64_t *slots;       /* [tables, tokens] where each token's key and value are stored */
    const int32_t *first_token; /* [rows + 1] */
    const int32_t *stored_len;  /* [rows] positions stored before this step */
    const int32_t *base_len;    /* [rows] committed positions, this step's included */
    const int32_t *position;    /* [tokens] absolute; nodes of one depth share theirs */
    const int32_t *path;        /* [tokens, most_depth] for a node of a tree: the nodes from the root down to itself */
} Step;

typedef struct {
    const void *query, *key, *value; /* [heads, tokens, dim], contiguous in dim alone */
    void *output;                    /* [tokens, heads, dim] */
    void *keys, *values;             /* [blocks, block_size, kv_heads, dim] */
    int64_t query_head, query_token, key_head, key_token, value_head, value_token; /* strides, in elements */
    int64_t query_kind, output_kind; /* kinds of the queries and the output */
    int64_t heads, kv_heads, dim, table;
    int64_t window, sinks; /* a window of 0 means no window */
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

/* Round to nearest, ties to even; NaN stays NaN. */
static inline uint16_t narrow_bfloat16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : rounded);
}

/* Store floats as FLOAT32 or BFLOAT16 numbers, from index `at` on. */
static inline void put(void *to, int64_t kind, int64_t at, const float *from, int64_t count)
{
    if (kind == BFLOAT16)
        for (int64_t i = 0; i < count; i++) ((uint16_t *)to)[at + i] = narrow_bfloat16(from[i]);
    else
        memcpy((float *)to + at, from, (size_t)count * sizeof *from);
}

/* Store one token's key and value. */
void pilotfish_store_bfloat16(const Step *step, const Layer *layer, int64_t token);
void pilotfish_store_float32(const Step *step, const Layer *layer, int64_t token);

/* A layer's work items: tiles of a row's queries times groups of `heads` KV heads. */
typedef struct {
    int64_t count, tiles, heads;
    const int64_t *first; /* [rows + 1] each row's first tile */
} Items;

/* The items of a step in one layer for `team` threads. Fills `first` [rows + 1]. */
Items pilotfish_items(const Step *step, const Layer *layer, int64_t team, int64_t *first);

/* Compute one item. All keys and values of the step must be stored first. */
void pilotfish_item_bfloat16(const Step *step, const Layer *layer, const Items *items, int64_t item);
void pilotfish_item_float32(const Step *step, const Layer *layer, const Items *items, int64_t item);

#endif
