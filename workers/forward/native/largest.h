/* The largest values of a row. See largest.c. */

#ifndef PILOTFISH_LARGEST_H
#define PILOTFISH_LARGEST_H

#include <stdint.h>

/* Of values [size], the `count` <= size largest, the largest first and of equal ones the first, their columns, and the
   logarithm of the sum of all exponentials, 0 if all are minus infinity. Columns of minus infinity may repeat. */
void pilotfish_largest_of_row(const float *values, int64_t size, int64_t count, float *best, int64_t *columns, float *total);

#endif
