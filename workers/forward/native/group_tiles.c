/* Products of 4-bit and 8-bit integers in groups on the tile registers of AMX.

   A row of activations is two rows of a tile, coarse and fine, see split_groups.c. A row of a tile register is one group, or
   half of one of 128 inputs. The sums of integers of a few groups go through memory to vectors, which apply scales to them while
   the tile registers multiply the next ones. Values of 4 bits are widened once for all rows of a call. */

#include "finish.h"
#include "registers.h"
#include "split_groups.h"

#define SLAB 2                   /* groups that are multiplied before vectors apply their scales */
#define TOGETHER 4               /* rows to which a group's scales are applied at a time */
#define ROWS (TILE_GROUP / 2)    /* rows that share a reading of the weights */
#define OUTPUTS (2 * HALF)       /* outputs of a block */
#define MOST_BYTES (128 * OUTPUTS) /* widened values of a group */
#define AHEAD 4096               /* bytes of weights to prefetch */
#define ALIGNED __attribute__((aligned(LINE)))

/* Groups of a block, ready for the registers. */
typedef struct {
    int64_t groups, first; /* their number, and the first one */
    const int8_t *values[SLAB]; /* [group / 4, OUTPUTS, 4] */
    Head heads[SLAB];
    int8_t wide[SLAB * MOST_BYTES] ALIGNED;
} Slab;

/* Sums of integers to which scales are not yet applied. */
typedef struct {
    const Slab *slab;
    int64_t row, rows, done; /* the first row, their number, and those whose scales are applied */
    int32_t sums[SLAB][TILE_GROUP][OUTPUTS] ALIGNED;
} Part;

static void widen(const uint8_t *from, int64_t count, int8_t *to)
{
    for (int64_t i = 0; i < count; i += OUTPUTS * WORD / 2, to += OUTPUTS * WORD, from += OUTPUTS * WORD / 2) {
        for (int c = 0; c < OUTPUTS * WORD / 2; c++) to[c] = (int8_t)(from[c] & 0xf);
        for (int c = 0; c < OUTPUTS * WORD / 2; c++) to[OUTPUTS * WORD / 2 + c] = (int8_t)(from[c] >> 4);
    }
}

static void fill(const Matrix *matrix, int64_t block, int64_t first, Slab *slab)
{
    const int64_t left = groups_of(matrix) - first, before = head_bytes(matrix), bytes = group_bytes(matrix);
    char unpacked[MOST_UNPACKED] ALIGNED;
    slab->first = first, slab->groups = left < SLAB ? left : SLAB;
    for (int64_t g = 0; g < slab->groups; g++) {
        const Place place = place_of(matrix, block, first + g);
        const char *values = place.group + before;
        int8_t *wide = slab->wide + g * matrix->group * OUTPUTS;
        for (int64_t line = 0; line < bytes; line += LINE) __builtin_prefetch(place.group + AHEAD + line, 0, 3);
        slab->heads[g] = head_of(matrix, &place, 0);
        if (matrix->planes) {
            char *to = matrix->kind == GROUPS4_TILES ? unpacked : (char *)wide;
            pilotfish_unpack_planes(matrix, values, to);
            values = to;
        }
        slab->values[g] = matrix->kind == GROUPS4_TILES ? wide : (const int8_t *)values;
        if (matrix->kind == GROUPS4_TILES) widen((const uint8_t *)values, unpacked_bytes(matrix), wide);
    }
}

/* What a tile of inputs is multiplied with, and where its sums go: one group of at most ROWS / 2 rows. */
typedef struct {
    const int8_t *x;      /* [rows, 2, group] */
    const int8_t *values; /* [group / 4, OUTPUTS, 4] */
    int32_t *sums;        /* [rows, 2, OUTPUTS] */
    int rows;             /* may be none */
} Share;

/* Multiply two shares, since the registers of one alone would wait for its products. */
INLINE void multiply_two(Emulated *emulated, const Share *one, const Share *other, int64_t group)
{
    const int bytes = (int)(group < TILE_BYTES ? group : TILE_BYTES), again = other->values != one->values;
    const int64_t stride = 2 * TILE_BYTES;
    configure(emulated, 2 * one->rows, 2 * other->rows, bytes);
    for (int64_t k = 0; k < group; k += bytes) {
        const int8_t *values = one->values + k * OUTPUTS;
        if (k == 0) CLEAR(SUMS);
        if (k == 0) CLEAR(SUMS + 1);
        LOAD(WEIGHTS, values, stride);
        LOAD(ROWS_OF_INPUTS, one->x + k, group);
        MULTIPLY_INT8(SUMS, ROWS_OF_INPUTS, WEIGHTS);
        LOAD(WEIGHTS + 1, values + TILE_BYTES, stride);
        MULTIPLY_INT8(SUMS + 1, ROWS_OF_INPUTS, WEIGHTS + 1);
        if (!other->rows) continue;
        values = other->values + k * OUTPUTS;
        if (k == 0) CLEAR(SUMS + 2);
        if (k == 0) CLEAR(SUMS + 3);
        if (again) LOAD(WEIGHTS, values, stride);
        LOAD(ROWS_OF_INPUTS + 1, other->x + k, group);
        MULTIPLY_INT8(SUMS + 2, ROWS_OF_INPUTS + 1, WEIGHTS);
        if (again) LOAD(WEIGHTS + 1, values + TILE_BYTES, stride);
        MULTIPLY_INT8(SUMS + 3, ROWS_OF_INPUTS + 1, WEIGHTS + 1);
    }
}

/* Store the sums of `multiply_two`. */
INLINE void save_two(Emulated *emulated, const Share *one, const Share *other)
{
    const int64_t stride = 2 * TILE_BYTES;
    SAVE(SUMS, one->sums, stride);
    SAVE(SUMS + 1, one->sums + HALF, stride);
    if (!other->rows) return;
    SAVE(SUMS + 2, other->sums, stride);
    SAVE(SUMS + 3, other->sums + HALF, stride);
}

INLINE Words joined(const int32_t *coarse, const int32_t *fine)
{
    return (*(const Words *)coarse << COARSE_BITS) + *(const Words *)fine;
}

/* Apply the scales of the part's groups to `rows` of its rows: `totals` [rows, OUTPUTS] of the block. */
INLINE void apply_to(const SplitGroups *input, const Part *part, int64_t groups, const int64_t offset, const int rows, float *totals)
{
    const int64_t at = (part->row + part->done) * groups + part->slab->first;
    float *total = totals + (part->row + part->done) * OUTPUTS;
    Vector sum[TOGETHER][2];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        sum[r][0] = *(const Vector *)(total + r * OUTPUTS), sum[r][1] = *(const Vector *)(total + r * OUTPUTS + LANES);
    for (int64_t g = 0; g < part->slab->groups; g++) {
        const Head head = part->slab->heads[g];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const int32_t *coarse = part->sums[g][2 * (part->done + r)], *fine = coarse + OUTPUTS;
            apply_integers(&head, offset, input->steps[at + r * groups + g], input->sums[at + r * groups + g], joined(coarse, fine),
                           joined(coarse + LANES, fine + LANES), sum[r]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        *(Vector *)(total + r * OUTPUTS) = sum[r][0], *(Vector *)(total + r * OUTPUTS + LANES) = sum[r][1];
}

/* The same to its rows up to `end`. */
static void apply(const Matrix *matrix, const SplitGroups *input, Part *part, int64_t end, float *totals)
{
    const int64_t groups = groups_of(matrix);
    for (; part->done + TOGETHER <= end; part->done += TOGETHER)
        if (matrix->offset == MINIMUM) apply_to(input, part, groups, MINIMUM, TOGETHER, totals);
        else apply_to(input, part, groups, ZERO, TOGETHER, totals);
    for (; part->done < end; part->done++)
        if (matrix->offset == MINIMUM) apply_to(input, part, groups, MINIMUM, 1, totals);
        else apply_to(input, part, groups, ZERO, 1, totals);
}

/* Multiply the part's rows with its groups, and meanwhile apply the scales of the pending part. */
static void multiply_part(const Matrix *matrix, const SplitGroups *input, Part *part, Part *pending, float *totals)
{
    const Slab *slab = part->slab;
    const int64_t group = matrix->group, groups = slab->groups;
    const int first = part->rows < ROWS / 2 ? (int)part->rows : ROWS / 2, second = (int)part->rows - first;
#ifdef EMULATE_TILES
    Emulated tiles, *const emulated = &tiles;
#else
    Emulated *const emulated = NULL;
#endif
    const int64_t each = second ? 1 : 2; /* groups of a turn */
    for (int64_t g = 0; g < groups; g += each) {
        const int8_t *x = input->numbers + 2 * group * (part->row + (slab->first + g) * input->rows);
        const Share one = {x, slab->values[g], part->sums[g][0], first};
        Share other = {x + ROWS * group, slab->values[g], part->sums[g][ROWS], second};
        if (!second && g + 1 < groups) other = (Share){x + 2 * group * input->rows, slab->values[g + 1], part->sums[g + 1][0], first};
        multiply_two(emulated, &one, &other, group);
        apply(matrix, input, pending, g + each < groups ? pending->rows * (g + each) / groups : pending->rows, totals);
        save_two(emulated, &one, &other);
    }
}

void pilotfish_multiply_groups_on_tiles(const Matrix *matrix, const SplitGroups *input, const Output *output, int64_t block,
                                        int64_t row, int64_t rows)
{
    const int64_t groups = groups_of(matrix);
    float totals[rows * OUTPUTS] ALIGNED;
    Slab slabs[2];
    Part parts[2];
    int turn = 0, slab = 0;
    parts[1].rows = parts[1].done = 0; /* nothing is pending */
    memset(totals, 0, sizeof totals);
    for (int64_t first = 0; first < groups; first += SLAB, slab ^= 1) {
        fill(matrix, block, first, slabs + slab);
        for (int64_t done = 0; done < rows; done += ROWS, turn ^= 1) {
            Part *part = parts + turn;
            part->slab = slabs + slab, part->row = done, part->rows = rows - done < ROWS ? rows - done : ROWS, part->done = 0;
            multiply_part(matrix, input, part, parts + (turn ^ 1), totals);
        }
    }
    apply(matrix, input, parts + (turn ^ 1), parts[turn ^ 1].rows, totals);
    pilotfish_finish(matrix, output, block, row, totals, rows);
}
