/* Attention over the slots of a drafting module's window. See windows.c. */

#ifndef PILOTFISH_WINDOWS_H
#define PILOTFISH_WINDOWS_H

#include "numbers.h"

/* Keys and values side by side, of one key-value head. */
typedef struct {
    const float *keys, *values; /* [slots, dim] */
    const uint8_t *seen;        /* [tokens, slots], which slots each token attends to, or none if it is all */
    int64_t seen_stride, slots, dim;
} Slots;

/* Attention of `queries` [tokens, each, dim] → `sums` of the same shape. Every token sees at least one slot. */
void pilotfish_attend_slots(const float *queries, int64_t tokens, int64_t each, const Slots *slots, float scale, float *sums);

#endif
