/* Products of weights in groups with activations that are rounded to integers. See split_groups.c. */

#ifndef PILOTFISH_SPLIT_GROUPS_H
#define PILOTFISH_SPLIT_GROUPS_H

#include "packed_groups.h"

#define COARSE_BITS 8  /* a coarse step is 2^COARSE_BITS fine ones */
#define SMALL_GROUP 32 /* inputs of a group whose sums of products with values of 4 bits are below 2^24 */

/* How rows are multiplied: with vectors; with int8 numbers on tile registers; with bfloat16 numbers on tile registers. */
typedef enum { VECTORS, INT8_NUMBERS, BFLOAT16_NUMBERS } Path;

/* Rows of FLOAT32 inputs, each group as integers of 16 bits times a step: x = step * integer. For tile registers an integer is
   the sum of a coarse multiple of 2^COARSE_BITS and a fine number. */
typedef struct {
    int64_t rows;    /* that the numbers have room for */
    int8_t *numbers; /* VECTORS: [groups, rows, group] integers of 16 bits
                        INT8_NUMBERS: [groups, rows, 2, group] coarse, fine, in the order of packed weights, see packed_groups.h
                        BFLOAT16_NUMBERS: [groups, rows / 16, 2, 16, group] in bfloat16, in the order of VECTORS; the coarse ones
                        are the multiples */
    float *steps;    /* [rows, groups] */
    float *sums;     /* [rows, groups] the sums of the inputs */
} SplitGroups;

/* Add a group's products to the sums of one row: `first` and `second` are sums of integers. */
INLINE void apply_integers(const Head *head, int64_t offset, float step, float inputs, Words first, Words second, Vector *sum)
{
    apply_group(head, offset, inputs, floats(first) * same(step), floats(second) * same(step), sum);
}

/* Whether matrices with groups of so many inputs are multiplied in this way: GROUPS4_TILES or GROUPS8_TILES. */
int pilotfish_splits_groups(int64_t group);

/* This thread's share of a product with such a matrix: input FLOAT32 [rows, inputs]. */
void pilotfish_multiply_split_groups(const Matrix *matrix, const float *input, const Output *output, int64_t rows, int64_t team);

/* One block of outputs times rows that were split, on tile registers. */
void pilotfish_multiply_groups_on_tiles(const Matrix *matrix, const SplitGroups *input, const Output *output, int64_t block,
                                        int64_t row, int64_t rows);

/* The same with BFLOAT16_NUMBERS for groups of 4 bits of at most SMALL_GROUP inputs. The numbers have room for a multiple of
   TILE_GROUP rows. */
void pilotfish_multiply_small_groups_on_tiles(const Matrix *matrix, const SplitGroups *input, const Output *output, int64_t block,
                                              int64_t row, int64_t rows);

#endif
