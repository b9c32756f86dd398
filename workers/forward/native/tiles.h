/* Products on the tile registers of processors with AMX. See tiles.c. */

#ifndef PILOTFISH_TILES_H
#define PILOTFISH_TILES_H

#include "products.h"

#define TILE_GROUP 32      /* rows that share a reading of the weights */
#define MOST_TILE_ROWS 512 /* rows of a call */

/* Whether tiles are used: the processor has them, and a trial showed that it computes with them as expected. */
int pilotfish_has_tiles(void);

/* Whether a BFLOAT16 matrix is multiplied on tiles. The same for all products with it, whatever the number of rows. */
int pilotfish_on_tiles(const Matrix *matrix);

/* Sums of rows and a block to which the operations after the product are not yet applied: vectors apply them
   while the tile registers multiply the next block. Begin with no rows. */
typedef struct {
    const Matrix *matrix;
    const Output *output;
    int64_t block, row, rows;
    const float *sums;
    int turn;
    float buffers[2][MOST_TILE_ROWS * COLUMNS] __attribute__((aligned(LINE)));
} Pending;

/* One block of outputs times `rows` rows, at most MOST_TILE_ROWS, from `row` on. Finishes what is pending; its own sums stay
   pending. */
void pilotfish_multiply_on_tiles(const Matrix *matrix, const void *input, const Output *output, int64_t block, int64_t row,
                                 int64_t rows, Pending *pending);

void pilotfish_finish_pending(Pending *pending);

#define FINE 254.0f /* fine steps of a coarse one; the fine number is at most 127, too */

/* Rows of FLOAT32 inputs as sums of two int8 numbers each: x = step * (coarse + fine / FINE). See split.c. */
typedef struct {
    int8_t *numbers; /* [rows, 2, inputs] coarse, fine */
    int32_t *excess; /* [rows, 2] the sums of these numbers times 128 */
    float *steps;    /* [rows] */
} SplitRows;

/* Whether rows of `inputs` inputs are split for int8 weights, which then are INT8_TILES. */
int pilotfish_splits_rows(int64_t inputs);

void pilotfish_split_rows(const float *x, int64_t rows, int64_t inputs, const SplitRows *to);

/* An INT8_TILES matrix times rows that were split: one block of outputs. */
void pilotfish_multiply_split(const Matrix *matrix, const SplitRows *input, const Output *output, int64_t block, int64_t row,
                              int64_t rows);
void pilotfish_multiply_split_on_tiles(const Matrix *matrix, const SplitRows *input, const Output *output, int64_t block,
                                       int64_t row, int64_t rows);

/* Free this thread's tile registers, so that the system need not save them. */
void pilotfish_leave_tiles(void);

#endif
