/* Products of bfloat16 and int8 numbers on the tile registers of AMX.

   A tile register holds 16 rows of 64 bytes. One instruction multiplies 16 rows of 32 activations with 32 inputs of 16
   outputs. An output is summed over 32 inputs, the even ones and the odd ones by themselves; these two sums are added,
   and then added to the sum of the inputs before. The order does not depend on the number of rows.

   int8 weights need activations in int8. One number of 8 bits is too coarse, so an activation is the sum of two, and
   each row of activations two rows of a tile. Sums of integers are exact. Few rows take half the time of bfloat16, since
   half as many bytes are read; many rows take as long.

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
#define INT8_INPUTS TILE_BYTES
#define FINE 254.0f                            /* fine steps of a coarse one; the fine number is at most 127, too */
#define MOST_SPLIT 8192                        /* inputs of an INT8_TILES matrix: rows are split on the stack */
#define HALF (TILE_BYTES / (int)sizeof(float)) /* outputs of a tile */
#define OUTPUTS (2 * HALF)                     /* outputs of a block that tiles can multiply */
#define NEAR 2048                              /* bytes of weights to prefetch to the first-level cache */
#define FAR 8192                               /* the same to the second level, where two tiles of rows leave the first no room */

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

static void multiply_int8_emulated(Emulated *tiles, int to, int rows, int weights)
{
    for (int r = 0; r < tiles->rows[to]; r++) {
        const int8_t *x = (const int8_t *)tiles->data[rows][r];
        int32_t *sums = (int32_t *)tiles->data[to][r];
        for (int output = 0; output < HALF; output++)
            for (int k = 0; k < INT8_INPUTS; k++)
                sums[output] += x[k] * ((const int8_t *)tiles->data[weights][k / 4])[4 * output + k % 4];
    }
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
        if (emulated && is_int8) multiply_int8_emulated(emulated, TO, X, W);                                           \
        else if (emulated) multiply_emulated(emulated, TO, X, W);                                                      \
        else if (is_int8) REAL("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(X), "i"(W));                      \
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

/* At most TILE_GROUP rows of inputs [rows, row_bytes] times a block's weights → sums [rows, OUTPUTS], float or int32_t. */
INLINE void multiply_group(Emulated *emulated, const int is_int8, const void *input, int64_t row_bytes, const void *matrix,
                           int rows, int is_first_reading, void *sums)
{
    const int first = rows < TILE_ROWS ? rows : TILE_ROWS, second = rows - first;
    const int64_t stride = 2 * TILE_BYTES;
    const char *x = input, *weights = matrix;
    configure(emulated, first, second);
    CLEAR(SUMS);
    CLEAR(SUMS + 1);
    if (second) {
        CLEAR(SUMS + 2);
        CLEAR(SUMS + 3);
    }
    for (int64_t k = 0; k < row_bytes; k += TILE_BYTES, weights += TILE_ROWS * stride) {
        for (int line = 0; is_first_reading && line < 2 * TILE_ROWS; line++) {
            if (second) __builtin_prefetch(weights + FAR + line * LINE, 0, 2);
            __builtin_prefetch(weights + NEAR + line * LINE, 0, 3);
        }
        LOAD(WEIGHTS, weights, stride);
        LOAD(ROWS_OF_INPUTS, x + k, row_bytes);
        MULTIPLY(SUMS, ROWS_OF_INPUTS, WEIGHTS);
        LOAD(WEIGHTS + 1, weights + TILE_BYTES, stride);
        MULTIPLY(SUMS + 1, ROWS_OF_INPUTS, WEIGHTS + 1);
        if (second) {
            LOAD(ROWS_OF_INPUTS + 1, x + TILE_ROWS * row_bytes + k, row_bytes);
            MULTIPLY(SUMS + 2, ROWS_OF_INPUTS + 1, WEIGHTS);
            MULTIPLY(SUMS + 3, ROWS_OF_INPUTS + 1, WEIGHTS + 1);
        }
    }
    char *to = sums; /* [rows, 2, TILE_BYTES] */
    SAVE(SUMS, to, stride);
    SAVE(SUMS + 1, to + TILE_BYTES, stride);
    if (second) {
        SAVE(SUMS + 2, to + TILE_ROWS * stride, stride);
        SAVE(SUMS + 3, to + TILE_ROWS * stride + TILE_BYTES, stride);
    }
}

int pilotfish_on_tiles(const Matrix *matrix)
{
    if (!is_enabled) return 0;
    if (matrix->kind == INT8_TILES) return matrix->inputs % INT8_INPUTS == 0 && matrix->inputs <= MOST_SPLIT;
    return matrix->kind == BFLOAT16 && matrix->inputs % INPUTS == 0;
}

#ifdef EMULATE_TILES
#define WITH_TILES(...)                                                                                                \
    Emulated tiles;                                                                                                    \
    multiply_group(&tiles, __VA_ARGS__)
#else
#define WITH_TILES(...) multiply_group(NULL, __VA_ARGS__)
#endif

void pilotfish_multiply_on_tiles(const Matrix *matrix, const void *input, const Output *output, int64_t block, int64_t row,
                                 int64_t rows)
{
    const int64_t inputs = matrix->inputs;
    const uint16_t *weights = (const uint16_t *)matrix->weights + block * inputs * OUTPUTS;
    float sums[TILE_GROUP * OUTPUTS];
    for (int64_t done = 0; done < rows; done += TILE_GROUP) {
        const int some = (int)(rows - done < TILE_GROUP ? rows - done : TILE_GROUP);
        const uint16_t *x = (const uint16_t *)input + (row + done) * inputs;
        WITH_TILES(0, x, inputs * (int64_t)sizeof *x, weights, some, done == 0, sums);
        pilotfish_finish(matrix, output, block, row + done, sums, some);
    }
}

void pilotfish_split_rows(const float *x, int64_t rows, int64_t inputs, const SplitRows *to)
{
    for (int64_t r = 0; r < rows; r++, x += inputs) {
        int8_t *coarse = to->numbers + 2 * r * inputs, *fine = coarse + inputs;
        float lanes[LANES] = {0}, zeros[LANES] = {0}, most = 0.0f, zero = 0.0f;
        for (int64_t i = 0; i < inputs; i += LANES) /* INT8_INPUTS is a multiple of it */
            for (int l = 0; l < LANES; l++) {
                lanes[l] = fabsf(x[i + l]) > lanes[l] ? fabsf(x[i + l]) : lanes[l];
                zeros[l] += x[i + l] * 0.0f; /* NaN from the first NaN or infinity on */
            }
        for (int l = 0; l < LANES; l++) most = lanes[l] > most ? lanes[l] : most, zero += zeros[l];
        if (zero != 0.0f) { /* no integers: all sums of the row are NaN */
            memset(coarse, 0, 2 * (size_t)inputs);
            to->steps[r] = NAN;
            continue;
        }
        const float step = most / 127.0f, factor = step > 0.0f ? 1.0f / step : 0.0f;
        to->steps[r] = factor < INFINITY ? step : 0.0f;
        for (int64_t i = 0; i < inputs; i++) {
            const float value = factor < INFINITY ? x[i] * factor : 0.0f, whole = rintf(value);
            coarse[i] = (int8_t)(int32_t)whole;
            fine[i] = (int8_t)(int32_t)rintf((value - whole) * FINE);
        }
    }
}

void pilotfish_multiply_split(const Matrix *matrix, const SplitRows *input, const Output *output, int64_t block, int64_t row,
                              int64_t rows)
{
    enum { MOST = TILE_GROUP / 2 };
    const int64_t inputs = matrix->inputs;
    const int8_t *weights = (const int8_t *)matrix->weights + block * inputs * OUTPUTS;
    int32_t whole[TILE_GROUP * OUTPUTS];
    float sums[MOST * OUTPUTS];
    for (int64_t done = 0; done < rows; done += MOST) {
        const int some = (int)(rows - done < MOST ? rows - done : MOST);
        WITH_TILES(1, input->numbers + 2 * done * inputs, inputs, weights, 2 * some, done == 0, whole);
        for (int r = 0; r < some; r++)
            for (int c = 0; c < OUTPUTS; c++)
                sums[r * OUTPUTS + c] = ((float)whole[2 * r * OUTPUTS + c] + (float)whole[(2 * r + 1) * OUTPUTS + c] / FINE) * input->steps[done + r];
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
    multiply_group(&tiles, 0, x, sizeof x[0] * WIDTH, weights, rows, 0, expected);
    multiply_group(NULL, 0, x, sizeof x[0] * WIDTH, weights, rows, 0, found);
    multiply_group(&tiles, 1, x, sizeof x[0] * WIDTH, weights, rows, 0, whole[0]);
    multiply_group(NULL, 1, x, sizeof x[0] * WIDTH, weights, rows, 0, whole[1]);
    pilotfish_leave_tiles();
    for (int i = 0; i < rows * OUTPUTS; i++)
        if (!(fabsf(found[i] - expected[i]) <= 1e-4f)) return 0; /* sums are below 100 */
    return memcmp(whole[0], whole[1], sizeof whole[0][0] * OUTPUTS * rows) == 0;
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
