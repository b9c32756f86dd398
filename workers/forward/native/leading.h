/* The leading logits of a head, without reading all of it. See leading.c. */

#ifndef PILOTFISH_LEADING_H
#define PILOTFISH_LEADING_H

#include "products.h"

#define MOST_LEADERS 8 /* most leaders per row */
#define PARTS 16       /* parts of a row of logits that are searched for leaders by themselves */

/* A smaller form of a head, and how far its logits may be from the head's. */
typedef struct {
    Matrix matrix;      /* the head in INT8 or INT8_TILES */
    const float *error; /* [blocks * COLUMNS]: |logit - the screen's| <= error * (1 + the norm of the input) */
} Screen;

/* Which logits are wanted: the `leaders` largest ones of each row. The others are buffers. */
typedef struct {
    int64_t leaders;
    float *norms;    /* [rows] */
    float *lower;    /* [rows, PARTS, MOST_LEADERS] the largest lower bounds of logits in each part, descending */
    int32_t *wanted; /* [blocks] blocks that may have a leader */
    int64_t count;   /* number of them */
} Leading;

/* Compute logits [rows, outputs] of a FLOAT32 head for input [rows, inputs], by all threads of a parallel region: those
   of all blocks that may have a leader of some row. The others are minus infinity. */
void pilotfish_multiply_leading(const Matrix *head, const Screen *screen, const float *input, float *logits, int64_t rows,
                                Leading *leading, Barrier *barrier);

#endif
