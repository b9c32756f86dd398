/* Products of 4-bit integers in groups of at most 32 inputs on the tile registers of AMX.

   An integer of 16 bits is the sum of two bfloat16 numbers, a coarse one and a fine one, and a value of 4 bits is one. The sums
   of the products of such a group are integers below 2^24 at every moment, so float32 holds them exactly: tile registers add
   both numbers' products to one float, which is the sum of integers that group_tiles.c and split_groups.c find. It takes no
   conversion, and half as many bytes go through memory to vectors as from sums of int8 numbers.

   Registers multiply a group of a part of the rows while vectors apply the scales to the part before. The sums of two parts take
   as little of the first-level cache as they can, since inputs stream through it. */

#include "finish.h"
#include "registers.h"
#include "split_groups.h"

#define TOGETHER 8            /* rows to which a group's scales are applied at a time */
#define OUTPUTS (2 * HALF)    /* outputs of a block */
#define PAIRS (SMALL_GROUP / 2)
#define AHEAD 4096            /* bytes of weights to prefetch */
#define APART 1984
#define ALIGNED __attribute__((aligned(LINE)))

/* A group of a block, ready for the registers. */
typedef struct {
    int64_t number;
    Head head;
    uint16_t wide[PAIRS][OUTPUTS][2] ALIGNED;
} Group;

/* Sums of a group and TILE_GROUP rows to which scales are not yet applied. */
typedef struct {
    const Group *group;
    int64_t row, done; /* the first row, and the number of those whose scales are applied */
    float sums[TILE_GROUP][OUTPUTS] ALIGNED;
    char apart[APART]; /* what is stored in one part and what is read of the other differ in the low bits of their addresses */
} Part;

/* What vectors do while the registers multiply. */
typedef struct {
    const SplitGroups *input;
    Part *pending; /* or none */
    int64_t groups;
    float *totals; /* [rows, OUTPUTS] */
} Beside;

/* Widen a group's values of 4 bits to bfloat16. The pairs of a WORD are those of split_groups.c. */
static void widen(const uint32_t *words, int64_t group, uint16_t (*to)[OUTPUTS][2])
{
#if HAS_VNNI
    uint16_t numbers[2 * WORD * 2];
    for (int i = 0; i < 32; i++) numbers[i] = narrow_bfloat16((float)(i % 16));
    const __m512i table = _mm512_loadu_si512(numbers);
    for (int64_t i = 0; i < group; i += WORD, words += OUTPUTS, to += WORD / 2)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const __m512i line = _mm512_loadu_si512(words + half * HALF);
#pragma GCC unroll 4
            for (int pair = 0; pair < WORD / 2; pair++) /* an index has five bits, of which the highest makes no difference */
                _mm512_store_si512(to[pair][half * HALF],
                                   _mm512_permutexvar_epi16(_mm512_srli_epi32(line, pair % 2 * 8 + pair / 2 * 4), table));
        }
#else
    for (int64_t i = 0; i < group; i += WORD, words += OUTPUTS, to += WORD / 2)
        for (int pair = 0; pair < WORD / 2; pair++)
            for (int c = 0; c < OUTPUTS; c++) {
                const uint32_t two = words[c] >> (pair % 2 * 8 + pair / 2 * 4);
                to[pair][c][0] = narrow_bfloat16((float)(two & 0xf)), to[pair][c][1] = narrow_bfloat16((float)(two >> 16 & 0xf));
            }
#endif
}

static void fill(const Matrix *matrix, int64_t block, int64_t number, Group *group)
{
    const int64_t bytes = group_bytes(matrix);
    const Place place = place_of(matrix, block, number);
    const char *values = place.group + head_bytes(matrix);
    char unpacked[MOST_UNPACKED] ALIGNED;
    for (int64_t line = 0; line < bytes; line += LINE) __builtin_prefetch(place.group + AHEAD + line, 0, 3);
    group->number = number, group->head = head_of(matrix, &place, 0);
    if (matrix->planes) pilotfish_unpack_planes(matrix, values, unpacked), values = unpacked;
    widen((const uint32_t *)values, matrix->group, group->wide);
}

/* Apply the scales of the pending part's group to TOGETHER of its rows. */
INLINE void apply(const Beside *beside, const int64_t offset)
{
    const SplitGroups *input = beside->input;
    Part *part = beside->pending;
    if (!part) return;
    const int64_t groups = beside->groups, row = part->row + part->done, at = row * groups + part->group->number;
    const Head head = part->group->head;
    const float *products = part->sums[part->done];
    float *total = beside->totals + row * OUTPUTS;
#pragma GCC unroll 8
    for (int r = 0; r < TOGETHER; r++, products += OUTPUTS, total += OUTPUTS) {
        const Vector step = same(input->steps[at + r * groups]);
        Vector sum[2] = {*(const Vector *)total, *(const Vector *)(total + LANES)};
        apply_group(&head, offset, input->sums[at + r * groups], *(const Vector *)products * step,
                    *(const Vector *)(products + LANES) * step, sum);
        *(Vector *)total = sum[0], *(Vector *)(total + LANES) = sum[1];
    }
    part->done += TOGETHER;
}

/* Store the sums of TILE_ROWS rows. */
#define SAVE_ROWS(FIRST, TO)                                                                                           \
    do {                                                                                                               \
        SAVE(FIRST, TO, stride);                                                                                       \
        SAVE(FIRST + 1, (TO) + HALF, stride);                                                                          \
    } while (0)

/* Multiply a group and a part's rows, and meanwhile apply the scales of the pending part, whose sums are stored just before
   their registers are needed. */
INLINE void multiply_part(Emulated *emulated, const Part *part, int64_t group, const Beside *beside, const int64_t offset)
{
    const int64_t stride = 2 * TILE_BYTES, row = 2 * group, size = row * TILE_ROWS; /* bytes, of a tile of inputs the latter */
    const char *x = (const char *)beside->input->numbers + 2 * row * (part->group->number * beside->input->rows + part->row);
    const uint16_t *values = part->group->wide[0][0];
    Part *pending = beside->pending;
    LOAD(WEIGHTS, values, stride);
    LOAD(ROWS_OF_INPUTS, x, row);
    if (pending) SAVE_ROWS(SUMS, pending->sums[0]);
    CLEAR(SUMS);
    MULTIPLY(SUMS, ROWS_OF_INPUTS, WEIGHTS);
    LOAD(WEIGHTS + 1, values + OUTPUTS, stride);
    CLEAR(SUMS + 1);
    MULTIPLY(SUMS + 1, ROWS_OF_INPUTS, WEIGHTS + 1);
    apply(beside, offset);
    LOAD(ROWS_OF_INPUTS + 1, x + 2 * size, row);
    if (pending) SAVE_ROWS(SUMS + 2, pending->sums[TILE_ROWS]);
    CLEAR(SUMS + 2);
    MULTIPLY(SUMS + 2, ROWS_OF_INPUTS + 1, WEIGHTS);
    CLEAR(SUMS + 3);
    MULTIPLY(SUMS + 3, ROWS_OF_INPUTS + 1, WEIGHTS + 1);
    apply(beside, offset);
    LOAD(ROWS_OF_INPUTS, x + size, row);
    MULTIPLY(SUMS, ROWS_OF_INPUTS, WEIGHTS);
    MULTIPLY(SUMS + 1, ROWS_OF_INPUTS, WEIGHTS + 1);
    apply(beside, offset);
    LOAD(ROWS_OF_INPUTS + 1, x + 3 * size, row);
    MULTIPLY(SUMS + 2, ROWS_OF_INPUTS + 1, WEIGHTS);
    MULTIPLY(SUMS + 3, ROWS_OF_INPUTS + 1, WEIGHTS + 1);
    apply(beside, offset);
}

static void multiply_minimum(Emulated *emulated, const Part *part, int64_t group, const Beside *beside)
{
    multiply_part(emulated, part, group, beside, MINIMUM);
}

static void multiply_zero(Emulated *emulated, const Part *part, int64_t group, const Beside *beside)
{
    multiply_part(emulated, part, group, beside, ZERO);
}

void pilotfish_multiply_small_groups_on_tiles(const Matrix *matrix, const SplitGroups *input, const Output *output, int64_t block,
                                              int64_t row, int64_t rows)
{
    const int64_t groups = groups_of(matrix), stride = 2 * TILE_BYTES;
    float totals[input->rows * OUTPUTS] ALIGNED;
    Group own[2];
    Part parts[2];
    Beside beside = {input, NULL, groups, totals};
    int turn = 0;
#ifdef EMULATE_TILES
    Emulated tiles, *const emulated = &tiles;
#else
    Emulated *const emulated = NULL;
#endif
    memset(totals, 0, sizeof totals);
    configure(emulated, TILE_ROWS, TILE_ROWS, (int)(2 * matrix->group));
    for (int64_t g = 0; g < groups; g++) {
        fill(matrix, block, g, own + g % 2);
        for (int64_t done = 0; done < input->rows; done += TILE_GROUP, turn ^= 1) {
            Part *part = parts + turn;
            part->group = own + g % 2, part->row = done, part->done = 0;
            if (matrix->offset == MINIMUM) multiply_minimum(emulated, part, matrix->group, &beside);
            else multiply_zero(emulated, part, matrix->group, &beside);
            beside.pending = part;
        }
    }
    SAVE_ROWS(SUMS, beside.pending->sums[0]);
    SAVE_ROWS(SUMS + 2, beside.pending->sums[TILE_ROWS]);
    while (beside.pending->done < TILE_GROUP)
        if (matrix->offset == MINIMUM) apply(&beside, MINIMUM);
        else apply(&beside, ZERO);
    pilotfish_finish(matrix, output, block, row, totals, rows);
}
