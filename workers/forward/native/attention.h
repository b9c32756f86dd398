/* The interface of the attention kernel for the decoder. See attention.c. */

#ifndef PILOTFISH_ATTENTION_H
#define PILOTFISH_ATTENTION_H

#include "numbers.h"

typedef struct {
    int64_t rows, tokens, block_size, most_blocks, most_depth;
    const int32_t *blocks;      /* [tables, rows, most_blocks], negative for a block that left the window */
    const int64_t *slots;       /* [tables, tokens] where each token's key and value are stored */
    const int32_t *first_token; /* [rows + 1] */
    const int32_t *stored_len;  /* [rows] positions stored before this step */
    const int32_t *base_len;    /* [rows] committed positions, this step's included; or more, if no row has a tree */
    const int32_t *position;    /* [tokens] absolute; nodes of one depth share theirs */
    const int32_t *path;        /* [tokens, most_depth] for a node of a tree: the nodes from the root down to itself */
} Step;

typedef struct {
    const void *query, *key, *value; /* [heads, tokens, dim], contiguous in dim alone */
    void *output;                    /* [tokens, heads, dim], or of the numbers of a value */
    void *keys, *values;             /* [blocks, block_size, kv_heads, dim], or records in 8 bits [blocks, block_size, record] */
    int64_t query_head, query_token, key_head, key_token, value_head, value_token; /* strides, in elements */
    int64_t query_kind, output_kind; /* kinds of the queries (where the pool has 8 bits, of keys and values too) and the output */
    int64_t heads, kv_heads, dim, table;
    int64_t window, sinks; /* a window of 0 means no window */
    float scale;
    int64_t latent; /* if not 0, all heads share one key per token, whose first so many numbers are its value; kv_heads counts
                       groups of query heads, and values are the keys */
    const float *slopes; /* [heads] of ALiBi: times (key position - query position), added to a score; or none */
} Layer;

/* Store one token's key and value. */
void pilotfish_store_bfloat16(const Step *step, const Layer *layer, int64_t token);
void pilotfish_store_float32(const Step *step, const Layer *layer, int64_t token);
void pilotfish_store_int8(const Step *step, const Layer *layer, int64_t token);
void pilotfish_store_e4m3(const Step *step, const Layer *layer, int64_t token);

/* A layer's work items: tiles of at most `tokens` tokens of a row times groups of `heads` KV heads. */
typedef struct {
    int64_t count, tiles, heads, tokens;
    int64_t on_tiles;     /* whether tile registers compute them */
    const int64_t *first; /* [rows + 1] each row's first tile */
} Items;

/* The items of a step in one layer for `team` threads, for a pool of numbers of this kind. Fills `first` [rows + 1]. */
Items pilotfish_items(const Step *step, const Layer *layer, int64_t kind, int64_t team, int64_t *first);

/* Compute one item. All keys and values of the step must be stored first. */
void pilotfish_item_bfloat16(const Step *step, const Layer *layer, const Items *items, int64_t item);
void pilotfish_item_float32(const Step *step, const Layer *layer, const Items *items, int64_t item);
void pilotfish_item_int8(const Step *step, const Layer *layer, const Items *items, int64_t item);
void pilotfish_item_e4m3(const Step *step, const Layer *layer, const Items *items, int64_t item);

/* Attention on tile registers. See attention_tiles.c. */
#define MOST_ON_TILES 192 /* query vectors per item, of all its KV heads */

/* Whether all queries of a layer are computed on tiles: the same for every step. */
int pilotfish_attends_on_tiles(const Layer *layer, int64_t kind);

/* The queries of `count` tokens of a row from `token` on, of the heads that share the KV heads head … head + heads - 1. */
void pilotfish_attend_on_tiles(const Step *step, const Layer *layer, int64_t row, int64_t head, int64_t heads, int64_t token,
                               int64_t count);

#endif
