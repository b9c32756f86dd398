/* Products of bfloat16 and int8 numbers on the tile registers of AMX.

   A tile register holds 16 rows of 64 bytes. One instruction multiplies 16 rows of 32 activations with 32 inputs of 16
   outputs. An output is summed over 32 inputs, the even ones and the odd ones by themselves; these two sums are added,
   and then added to the sum of the inputs before. The order does not depend on the number of rows.

   int8 weights need activations in int8: split.c makes two numbers of each, so a row of activations is two rows of a tile.
   Few rows take half the time of bfloat16, since half as many bytes are read; many rows take as long.

   Tiles are used after a trial on the processor itself shows that they compute what the same code computes on
   emulated registers. */

#include "finish.h"
#include "registers.h"

#if HAS_TILES
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define OUTPUTS (2 * HALF)                     /* outputs of a block that tiles can multiply */
#define SLAB 9                                 /* steps of a slab: 32 rows and a block of a slab fit the first-level cache */
#define NEAR 2048                              /* bytes of weights to prefetch to the first-level cache */
#define FAR 8192                               /* the same to the second level, where two tiles of rows leave the first no room */

static int is_enabled;
_Thread_local int pilotfish_configured;

/* --- products -------------------------------------------------------------------------------- */

/* Finish at most `most` of the rows that are pending. */
static inline void finish_some(Pending *pending, int64_t most)
{
    const int64_t rows = pending->rows < most ? pending->rows : most;
    if (!rows) return;
    pilotfish_finish(pending->matrix, pending->output, pending->block, pending->row, pending->sums, rows);
    pending->row += rows, pending->rows -= rows, pending->sums += rows * OUTPUTS;
}

#define ADD_PRODUCTS(TO, X, W)                                                                                         \
    do {                                                                                                               \
        if (is_int8) MULTIPLY_INT8(TO, X, W);                                                                          \
        else MULTIPLY(TO, X, W);                                                                                       \
    } while (0)

/* How a group is multiplied. ALONE: it alone reads the block's weights, which are prefetched. FIRST, AGAIN: other groups
   read them, too; its sums begin, or go on. */
typedef enum { ALONE, FIRST, AGAIN } Reading;

/* What happens in each step beside the products of groups: the next block's weights are prefetched to the second-level
   cache, and vectors finish pending sums. */
typedef struct {
    const char *next;
    int64_t lines;    /* to prefetch */
    Pending *pending; /* or none */
    int64_t rows;     /* to finish */
} Beside;

/* Multiply at most TILE_GROUP rows, `bytes` of each from `input` on, with a block's weights. The products are added to sums
   [rows, OUTPUTS], float or int32_t, if `reading` is AGAIN, else stored there. */
INLINE void multiply_group(Emulated *emulated, const int is_int8, const void *input, int64_t row_bytes, int64_t bytes,
                           const void *matrix, int rows, const Reading reading, Beside *beside, void *sums)
{
    const int first = rows < TILE_ROWS ? rows : TILE_ROWS, second = rows - first;
    const int64_t stride = 2 * TILE_BYTES;
    const char *x = input, *weights = matrix;
    char *to = sums; /* [rows, 2, TILE_BYTES] */
    configure(emulated, first, second, TILE_BYTES);
    if (reading != AGAIN) {
        CLEAR(SUMS);
        CLEAR(SUMS + 1);
    } else {
        LOAD(SUMS, to, stride);
        LOAD(SUMS + 1, to + TILE_BYTES, stride);
    }
    if (second && reading != AGAIN) {
        CLEAR(SUMS + 2);
        CLEAR(SUMS + 3);
    } else if (second) {
        LOAD(SUMS + 2, to + TILE_ROWS * stride, stride);
        LOAD(SUMS + 3, to + TILE_ROWS * stride + TILE_BYTES, stride);
    }
    for (int64_t k = 0; k < bytes; k += TILE_BYTES, weights += TILE_ROWS * stride) {
        for (int line = 0; reading == ALONE && line < 2 * TILE_ROWS; line++) {
            if (second) __builtin_prefetch(weights + FAR + line * LINE, 0, 2);
            __builtin_prefetch(weights + NEAR + line * LINE, 0, 3);
        }
        if (reading != ALONE) {
            for (int64_t line = 0; line < beside->lines; line++) __builtin_prefetch(beside->next + line * LINE, 0, 2);
            beside->next += beside->lines * LINE;
        }
        LOAD(WEIGHTS, weights, stride);
        LOAD(ROWS_OF_INPUTS, x + k, row_bytes);
        ADD_PRODUCTS(SUMS, ROWS_OF_INPUTS, WEIGHTS);
        LOAD(WEIGHTS + 1, weights + TILE_BYTES, stride);
        ADD_PRODUCTS(SUMS + 1, ROWS_OF_INPUTS, WEIGHTS + 1);
        if (second) {
            LOAD(ROWS_OF_INPUTS + 1, x + TILE_ROWS * row_bytes + k, row_bytes);
            ADD_PRODUCTS(SUMS + 2, ROWS_OF_INPUTS + 1, WEIGHTS);
            ADD_PRODUCTS(SUMS + 3, ROWS_OF_INPUTS + 1, WEIGHTS + 1);
        }
        if (beside && beside->pending) finish_some(beside->pending, beside->rows);
    }
    SAVE(SUMS, to, stride);
    SAVE(SUMS + 1, to + TILE_BYTES, stride);
    if (second) {
        SAVE(SUMS + 2, to + TILE_ROWS * stride, stride);
        SAVE(SUMS + 3, to + TILE_ROWS * stride + TILE_BYTES, stride);
    }
}

int pilotfish_has_tiles(void)
{
    return is_enabled;
}

int pilotfish_on_tiles(const Matrix *matrix)
{
    return is_enabled && matrix->kind == BFLOAT16 && matrix->inputs % INPUTS == 0;
}

#ifdef EMULATE_TILES
#define WITH_TILES(...)                                                                                                \
    do {                                                                                                               \
        Emulated tiles;                                                                                                \
        multiply_group(&tiles, __VA_ARGS__);                                                                           \
    } while (0)
#else
#define WITH_TILES(...) multiply_group(NULL, __VA_ARGS__)
#endif

/* Rows that share readings of the weights are multiplied slab by slab: the block's weights of a slab stay in the
   first-level cache while the rows pass. */
void pilotfish_multiply_on_tiles(const Matrix *matrix, const void *input, const Output *output, int64_t block, int64_t row,
                                 int64_t rows, Pending *pending)
{
    const int64_t row_bytes = matrix->inputs * (int64_t)sizeof(uint16_t), steps = row_bytes / TILE_BYTES;
    const int64_t groups = (rows + TILE_GROUP - 1) / TILE_GROUP, slabs = (steps + SLAB - 1) / SLAB;
    const char *weights = (const char *)matrix->weights + block * row_bytes * OUTPUTS;
    const char *x = (const char *)input + row * row_bytes;
    if (rows <= TILE_ROWS) finish_some(pending, pending->rows);
    float *sums = pending->buffers[pending->turn ^= 1];
    Beside beside = {.pending = pending, .rows = (pending->rows + steps * groups - 1) / (steps * groups)};
    if (rows <= TILE_ROWS) { /* memory is what it waits for: nothing stays pending */
        WITH_TILES(0, x, row_bytes, row_bytes, weights, (int)rows, ALONE, NULL, sums);
        pilotfish_finish(matrix, output, block, row, sums, rows);
        return;
    }
    if (groups == 1) WITH_TILES(0, x, row_bytes, row_bytes, weights, (int)rows, ALONE, &beside, sums);
    beside.next = weights + row_bytes * OUTPUTS, beside.lines = (2 * TILE_ROWS + groups - 1) / groups;
    for (int64_t slab = 0; slab < slabs && groups > 1; slab++) {
        const int64_t from = steps * slab / slabs * TILE_BYTES, bytes = steps * (slab + 1) / slabs * TILE_BYTES - from;
        for (int64_t done = 0; done < rows; done += TILE_GROUP) {
            const int some = (int)(rows - done < TILE_GROUP ? rows - done : TILE_GROUP);
            const char *part = x + done * row_bytes + from, *of_part = weights + from * OUTPUTS;
            if (slab == 0) WITH_TILES(0, part, row_bytes, bytes, of_part, some, FIRST, &beside, sums + done * OUTPUTS);
            else WITH_TILES(0, part, row_bytes, bytes, of_part, some, AGAIN, &beside, sums + done * OUTPUTS);
        }
    }
    finish_some(pending, pending->rows);
    pending->matrix = matrix, pending->output = output, pending->block = block;
    pending->row = row, pending->rows = rows, pending->sums = sums;
}

void pilotfish_finish_pending(Pending *pending)
{
    finish_some(pending, pending->rows);
}

void pilotfish_multiply_split_on_tiles(const Matrix *matrix, const SplitRows *input, const Output *output, int64_t block,
                                       int64_t row, int64_t rows)
{
    enum { MOST = TILE_GROUP / 2 };
    const int64_t inputs = matrix->inputs;
    const int8_t *weights = (const int8_t *)matrix->weights + block * inputs * OUTPUTS;
    int32_t whole[TILE_GROUP * OUTPUTS];
    float sums[MOST * OUTPUTS];
    Beside nothing = {0};
    for (int64_t done = 0; done < rows; done += MOST) {
        const int some = (int)(rows - done < MOST ? rows - done : MOST);
        const int8_t *x = input->numbers + 2 * done * inputs;
        if (done == 0) WITH_TILES(1, x, inputs, inputs, weights, 2 * some, ALONE, NULL, whole);
        else WITH_TILES(1, x, inputs, inputs, weights, 2 * some, FIRST, &nothing, whole);
        for (int r = 0; r < some; r++)
            for (int c = 0; c < OUTPUTS; c++)
                sums[r * OUTPUTS + c] = ((float)whole[2 * r * OUTPUTS + c] + (float)whole[(2 * r + 1) * OUTPUTS + c] / FINE) * input->steps[done + r];
        pilotfish_finish(matrix, output, block, row + done, sums, some);
    }
}

void pilotfish_leave_tiles(void)
{
    if (!pilotfish_configured) return;
    REAL("tilerelease");
    pilotfish_configured = 0;
}

/* --- whether the processor has them ---------------------------------------------------------- */

#if HAS_TILES && !defined(EMULATE_TILES)
enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18, BIT_BFLOAT16 = 22, BIT_TILES = 24, BIT_INT8 = 25, BIT_XSAVE = 27 };

static int is_permitted(void)
{
    uint32_t a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !((c >> BIT_XSAVE) & 1)) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !((d >> BIT_BFLOAT16) & (d >> BIT_TILES) & (d >> BIT_INT8) & 1)) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0)); /* what the system saves of each thread */
    if (((low >> 17) & 3) != 3) return 0;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

/* Products of int8 numbers whose tiles have rows of fewer than TILE_BYTES, as those of groups (group_tiles.c). */
INLINE void multiply_short(Emulated *emulated, const void *x, const void *weights, int bytes, int32_t *sums)
{
    configure(emulated, TILE_ROWS, 0, bytes);
    CLEAR(SUMS);
    LOAD(WEIGHTS, weights, TILE_BYTES);
    LOAD(ROWS_OF_INPUTS, x, bytes);
    MULTIPLY_INT8(SUMS, ROWS_OF_INPUTS, WEIGHTS);
    SAVE(SUMS, sums, TILE_BYTES);
}

/* Whether the processor computes what emulated registers compute. */
static int is_right(int rows)
{
    enum { WIDTH = 3 * INPUTS };
    uint16_t x[TILE_GROUP * WIDTH], weights[WIDTH * OUTPUTS];
    float found[TILE_GROUP * OUTPUTS], expected[TILE_GROUP * OUTPUTS];
    uint32_t state = 1;
    for (int i = 0; i < TILE_GROUP * WIDTH; i++)
        x[i] = narrow_bfloat16((float)((state = state * 1664525u + 1013904223u) >> 16) / 32768.0f - 1.0f);
    for (int i = 0; i < WIDTH * OUTPUTS; i++)
        weights[i] = narrow_bfloat16((float)((state = state * 1664525u + 1013904223u) >> 16) / 32768.0f - 1.0f);
    Emulated tiles;
    int32_t whole[2][TILE_GROUP * OUTPUTS]; /* the same bytes as int8 numbers */
    multiply_group(&tiles, 0, x, sizeof x[0] * WIDTH, sizeof x[0] * WIDTH, weights, rows, ALONE, NULL, expected);
    multiply_group(NULL, 0, x, sizeof x[0] * WIDTH, sizeof x[0] * WIDTH, weights, rows, ALONE, NULL, found);
    multiply_group(&tiles, 1, x, sizeof x[0] * WIDTH, sizeof x[0] * WIDTH, weights, rows, ALONE, NULL, whole[0]);
    multiply_group(NULL, 1, x, sizeof x[0] * WIDTH, sizeof x[0] * WIDTH, weights, rows, ALONE, NULL, whole[1]);
    pilotfish_leave_tiles();
    for (int i = 0; i < rows * OUTPUTS; i++)
        if (!(fabsf(found[i] - expected[i]) <= 1e-4f)) return 0; /* sums are below 100 */
    if (memcmp(whole[0], whole[1], sizeof whole[0][0] * OUTPUTS * rows) != 0) return 0;
    for (int bytes = 8; bytes < TILE_BYTES; bytes += 8) {
        multiply_short(&tiles, x, weights, bytes, whole[0]);
        multiply_short(NULL, x, weights, bytes, whole[1]);
        pilotfish_leave_tiles();
        if (memcmp(whole[0], whole[1], sizeof whole[0][0] * TILE_ROWS * HALF) != 0) return 0;
    }
    return 1;
}
#endif

/* Use tiles from now on if the processor has them and computes with them as expected. Returns whether it does. */
int pilotfish_use_tiles(void)
{
#if defined(EMULATE_TILES)
    is_enabled = COLUMNS == OUTPUTS;
#elif HAS_TILES
    is_enabled = COLUMNS == OUTPUTS && is_permitted() && is_right(1) && is_right(TILE_ROWS) && is_right(TILE_ROWS + 5) &&
                 is_right(TILE_GROUP);
#endif
    return is_enabled;
}
