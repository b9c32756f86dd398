/* Products of activations with packed weights, computed by all threads of a parallel region. See products.c. */

#ifndef PILOTFISH_PRODUCTS_H
#define PILOTFISH_PRODUCTS_H

#include <stdatomic.h>

#include "numbers.h"

/* EMULATE_TILES, for tests: compute as AMX does, on any processor. */
#if (defined(IS_AVX512) && defined(__AVX512BF16__)) || defined(EMULATE_TILES)
#define HAS_BFLOAT16_PRODUCTS 1
#else
#define HAS_BFLOAT16_PRODUCTS 0
#endif

#define COLUMNS (2 * LANES) /* outputs of a block: two vectors */

/* A packed matrix: blocks of COLUMNS outputs, each [inputs, COLUMNS] (BFLOAT16: [inputs / 2, COLUMNS, 2], INT8_TILES:
   [inputs / 4, COLUMNS, 4]; with groups: see packed_groups.h). */
typedef struct {
    int64_t kind, inputs, outputs, blocks; /* the last block is padded with zeros */
    const void *weights;
    const float *scale; /* [blocks * COLUMNS] for INT8 and INT8_TILES */
    const float *bias;  /* [blocks * COLUMNS], or none */
    int64_t group;      /* inputs of a group; a multiple of 8 for values of 4 bits and on tiles */
    int64_t scale_kind; /* FLOAT16, BFLOAT16, FLOAT32, SUPER_BYTES or SUPER_NIBBLES: the kind of scales, zeros and minima */
    int64_t offset;
    int64_t super;      /* SUPER_BYTES, SUPER_NIBBLES: groups of a super-block, else 0 */
    int64_t planes;     /* how the bits of values are divided */
    int64_t less;       /* what is subtracted from values of 8 bits once they are unpacked */
    float zero;             /* NO_OFFSET: that of all groups */
    const int32_t *order;   /* [inputs] which input of a row belongs to each weight, or none if they are in order */
    const float *table;     /* [16] GROUPS_TABLE: the numbers that the values choose from */
} Matrix;

static inline int has_groups(const Matrix *matrix)
{
    return matrix->kind >= GROUPS4 && matrix->kind <= GROUPS8_TILES;
}

/* What a group has beside its scale. A weight is scale * (value - zero), or scale * value + minimum. */
enum { NO_OFFSET, ZERO, MINIMUM };

/* How the bits of values are divided in memory: not at all, or into a plane of low bits and one of the bits above; see
   packed_groups.h. PLANES_2 and PLANES_2_1 are for values of 4 bits, the others for those of 8. */
enum { WHOLE, PLANES_2, PLANES_2_1, PLANES_4_1, PLANES_4_2 };

typedef enum { STORE, ADD, GATE, ROUND } After;

/* What follows a product. GATE takes a matrix whose blocks have LANES gates and the LANES ups that belong to them. */
typedef struct {
    After after;
    float *to;      /* STORE, ADD: [rows, width] */
    void *input;    /* GATE: [rows, width] in the type of the next product's input; ROUND: bfloat16 */
    int64_t width;
    int64_t kind;   /* GATE: kind of the next product's input */
} Output;

/* A barrier for the threads of a pass. OpenMP's own barrier spins for milliseconds if a thread has lost its core. */
typedef struct {
    atomic_int arrived, generation;
    int team;
} Barrier;

void pilotfish_wait_for_all(Barrier *barrier);

/* The type of a matrix's input. */
static inline int64_t factor_kind(const Matrix *matrix)
{
    return matrix->kind == BFLOAT16 && HAS_BFLOAT16_PRODUCTS ? BFLOAT16 : FLOAT32;
}

/* Compute this thread's share of a product of `rows` rows, for one of `team` threads. */
void pilotfish_multiply_share(const Matrix *matrix, const void *input, const Output *output, int64_t rows, int64_t team);

/* The same, then wait for all threads. */
void pilotfish_multiply(const Matrix *matrix, const void *input, const Output *output, int64_t rows, Barrier *barrier);

/* The same for `count` blocks of outputs alone, and few rows. The matrix is no INT8_TILES one. */
void pilotfish_multiply_blocks(const Matrix *matrix, const void *input, const Output *output, int64_t rows,
                               const int32_t *blocks, int64_t count, Barrier *barrier);

/* Write row `id` of a packed matrix, no INT8 or INT8_TILES one, to `to` [inputs]. */
void pilotfish_row(const Matrix *matrix, int64_t id, float *to);

#endif
