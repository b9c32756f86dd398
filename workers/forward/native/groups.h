/* Products of activations with weights in groups that share a scale. See groups.c. */

#ifndef PILOTFISH_GROUPS_H
#define PILOTFISH_GROUPS_H

#include "products.h"

/* This thread's share of a product with a matrix that has groups: input FLOAT32 [rows, inputs]. */
void pilotfish_multiply_groups(const Matrix *matrix, const float *input, const Output *output, int64_t rows, int64_t team);

/* Write row `id` of such a matrix to `to` [inputs]. */
void pilotfish_row_of_groups(const Matrix *matrix, int64_t id, float *to);

#endif
