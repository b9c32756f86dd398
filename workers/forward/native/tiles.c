/* Products of bfloat16 numbers on the tile registers of AMX.

   A tile register holds 16 rows of 64 bytes. One instruction multiplies 16 rows of 32 activations with 32 inputs of 16
   outputs. An output is summed over 32 inputs, the even ones and the odd ones by themselves; these two sums are added,
   and then added to the sum of the inputs before. The order does not depend on the number of rows.

   Tiles are used after a trial on the processor itself shows that they compute what the same code computes on
   emulated registers. */

#include "tiles.h"

#if defined(__x86_64__) && defined(__linux__) && HAS_BFLOAT16_PRODUCTS && __has_include(<amxtileintrin.h>)
#define HAS_TILES 1
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_TILES 0
#endif

#define TILE_ROWS 16
#define TILE_BYTES 64                          /* bytes of a row */
#define INPUTS 32                              /* inputs of a step: the bfloat16 numbers of a row */
#define HALF (TILE_BYTES / (int)sizeof(float)) /* outputs of a tile */
#define OUTPUTS (2 * HALF)                     /* outputs of a block that tiles can multiply */
#define AHEAD 8192                             /* bytes of weights to prefetch */

/* Numbers of the registers. */
enum { SUMS = 0, ROWS_OF_INPUTS = 4, WEIGHTS = 6 };

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row, for each register */
    uint8_t rows[16];
} Shapes;

typedef struct {
    uint8_t rows[8];
    uint8_t data[8][TILE_ROWS][TILE_BYTES];
} Emulated;

static int is_enabled;
static _Thread_local int configured; /* 32 * rows of the first tile of inputs + rows of the second, 0 for none */

/* --- instructions, real and emulated --------------------------------------------------------- */

#if HAS_TILES
#define REAL(...) __asm__ volatile(__VA_ARGS__)
#else
#define REAL(...) (void)0
#endif

static void load_emulated(Emulated *tiles, int to, const void *from, int64_t stride)
{
    for (int r = 0; r < tiles->rows[to]; r++) memcpy(tiles->data[to][r], (const char *)from + r * stride, TILE_BYTES);
}

static void store_emulated(const Emulated *tiles, int from, void *to, int64_t stride)
{
    for (int r = 0; r < tiles->rows[from]; r++) memcpy((char *)to + r * stride, tiles->data[from][r], TILE_BYTES);
}

static void multiply_emulated(Emulated *tiles, int to, int rows, int weights)
{
    for (int r = 0; r < tiles->rows[to]; r++) {
        const uint16_t *x = (const uint16_t *)tiles->data[rows][r];
        float *sums = (float *)tiles->data[to][r];
        for (int output = 0; output < HALF; output++) {
            float even = 0.0f, odd = 0.0f;
            for (int pair = 0; pair < INPUTS / 2; pair++) {
                const uint16_t *weight = (const uint16_t *)tiles->data[weights][pair] + 2 * output;
                even = fmaf(widen_bfloat16(x[2 * pair]), widen_bfloat16(weight[0]), even);
                odd = fmaf(widen_bfloat16(x[2 * pair + 1]), widen_bfloat16(weight[1]), odd);
            }
            sums[output] += even + odd;
        }
    }
}

#define LOAD(TILE, FROM, STRIDE)                                                                                       \
    do {                                                                                                               \
        if (emulated) load_emulated(emulated, TILE, FROM, STRIDE);                                                     \
        else REAL("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(FROM), "r"((int64_t)(STRIDE)), "i"(TILE) : "memory");          \
    } while (0)
#define SAVE(TILE, TO, STRIDE)                                                                                         \
    do {                                                                                                               \
        if (emulated) store_emulated(emulated, TILE, TO, STRIDE);                                                      \
        else REAL("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(TO), "r"((int64_t)(STRIDE)), "i"(TILE) : "memory");           \
    } while (0)
#define CLEAR(TILE)                                                                                                    \
    do {                                                                                                               \
        if (emulated) memset(emulated->data[TILE], 0, sizeof emulated->data[TILE]);                                    \
        else REAL("tilezero %%tmm%c0" ::"i"(TILE));                                                                    \
    } while (0)
#define MULTIPLY(TO, X, W)                                                                                             \
    do {                                                                                                               \
        if (emulated) multiply_emulated(emulated, TO, X, W);                                                           \
        else REAL("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(X), "i"(W));                                 \
    } while (0)

/* Give the registers their shapes: `first` and `second` rows of inputs, 0 of the second if there are few. */
static void configure(Emulated *emulated, int first, int second)
{
    Shapes shapes = {.palette = 1};
    const int rows[8] = {first, first, second, second, first, second, TILE_ROWS, TILE_ROWS};
    for (int t = 0; t < 8; t++) shapes.rows[t] = (uint8_t)rows[t], shapes.bytes[t] = rows[t] ? TILE_BYTES : 0;
    if (emulated) {
        memcpy(emulated->rows, shapes.rows, sizeof emulated->rows);
        return;
    }
    if (configured == TILE_GROUP * first + second) return;
    REAL("ldtilecfg %0" ::"m"(shapes));
    configured = TILE_GROUP * first + second;
}

/* --- products -------------------------------------------------------------------------------- */

/* At most TILE_GROUP rows of inputs [rows, inputs] times a block's weights → sums [rows, OUTPUTS]. */
INLINE void multiply_group(Emulated *emulated, const uint16_t *x, int64_t inputs, const uint16_t *weights, int rows,
                           int is_first_reading, float *sums)
{
    const int first = rows < TILE_ROWS ? rows : TILE_ROWS, second = rows - first;
    const int64_t row_bytes = inputs * (int64_t)sizeof *x, pair_bytes = 2 * TILE_BYTES;
    configure(emulated, first, second);
    CLEAR(SUMS);
    CLEAR(SUMS + 1);
    if (second) {
        CLEAR(SUMS + 2);
        CLEAR(SUMS + 3);
    }
    for (int64_t k = 0; k < inputs; k += INPUTS, weights += INPUTS * OUTPUTS) {
        if (is_first_reading)
            for (int line = 0; line < INPUTS; line++) __builtin_prefetch((const char *)weights + AHEAD + line * LINE, 0, 3);
        LOAD(WEIGHTS, weights, pair_bytes);
        LOAD(ROWS_OF_INPUTS, x + k, row_bytes);
        MULTIPLY(SUMS, ROWS_OF_INPUTS, WEIGHTS);
        LOAD(WEIGHTS + 1, weights + 2 * HALF, pair_bytes);
        MULTIPLY(SUMS + 1, ROWS_OF_INPUTS, WEIGHTS + 1);
        if (second) {
            LOAD(ROWS_OF_INPUTS + 1, x + TILE_ROWS * inputs + k, row_bytes);
            MULTIPLY(SUMS + 2, ROWS_OF_INPUTS + 1, WEIGHTS);
            MULTIPLY(SUMS + 3, ROWS_OF_INPUTS + 1, WEIGHTS + 1);
        }
    }
    const int64_t sums_bytes = OUTPUTS * (int64_t)sizeof *sums;
    SAVE(SUMS, sums, sums_bytes);
    SAVE(SUMS + 1, sums + HALF, sums_bytes);
    if (second) {
        SAVE(SUMS + 2, sums + TILE_ROWS * OUTPUTS, sums_bytes);
        SAVE(SUMS + 3, sums + TILE_ROWS * OUTPUTS + HALF, sums_bytes);
    }
}

int pilotfish_on_tiles(const Matrix *matrix)
{
    return is_enabled && matrix->kind == BFLOAT16 && matrix->inputs % INPUTS == 0;
}

void pilotfish_multiply_on_tiles(const Matrix *matrix, const void *input, const Output *output, int64_t block, int64_t row,
                                 int64_t rows)
{
    const int64_t inputs = matrix->inputs;
    const uint16_t *weights = (const uint16_t *)matrix->weights + block * inputs * OUTPUTS;
    float sums[TILE_GROUP * OUTPUTS];
    for (int64_t done = 0; done < rows; done += TILE_GROUP) {
        const int some = (int)(rows - done < TILE_GROUP ? rows - done : TILE_GROUP);
        const uint16_t *x = (const uint16_t *)input + (row + done) * inputs;
#ifdef EMULATE_TILES
        Emulated tiles;
        multiply_group(&tiles, x, inputs, weights, some, done == 0, sums);
#else
        multiply_group(NULL, x, inputs, weights, some, done == 0, sums);
#endif
        pilotfish_finish(matrix, output, block, row + done, sums, some);
    }
}

void pilotfish_leave_tiles(void)
{
    if (!configured) return;
    REAL("tilerelease");
    configured = 0;
}

/* --- whether the processor has them ---------------------------------------------------------- */

#if HAS_TILES && !defined(EMULATE_TILES)
enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18, BIT_BFLOAT16 = 22, BIT_TILES = 24, BIT_XSAVE = 27 };

static int is_permitted(void)
{
    uint32_t a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !((c >> BIT_XSAVE) & 1)) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !((d >> BIT_BFLOAT16) & (d >> BIT_TILES) & 1)) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0)); /* what the system saves of each thread */
    if (((low >> 17) & 3) != 3) return 0;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
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
    multiply_group(&tiles, x, WIDTH, weights, rows, 0, expected);
    multiply_group(NULL, x, WIDTH, weights, rows, 0, found);
    pilotfish_leave_tiles();
    for (int i = 0; i < rows * OUTPUTS; i++)
        if (!(fabsf(found[i] - expected[i]) <= 1e-4f)) return 0; /* sums are below 100 */
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
