/* Products on the tile registers of processors with AMX. See tiles.c. */

#ifndef PILOTFISH_TILES_H
#define PILOTFISH_TILES_H

#include "products.h"

#define TILE_GROUP 32 /* rows that share a reading of the weights */

/* Whether a matrix is multiplied on tiles. The same for all products with it, whatever the number of rows. */
int pilotfish_on_tiles(const Matrix *matrix);

/* One block of outputs times `rows` rows from `row` on. */
void pilotfish_multiply_on_tiles(const Matrix *matrix, const void *input, const Output *output, int64_t block, int64_t row,
                                 int64_t rows);

/* Free this thread's tile registers, so that the system need not save them. */
void pilotfish_leave_tiles(void);

#endif
