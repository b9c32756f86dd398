/* The tile registers of AMX, real and emulated. See tiles.c. */

#ifndef PILOTFISH_REGISTERS_H
#define PILOTFISH_REGISTERS_H

#include "tiles.h"

#if defined(__x86_64__) && defined(__linux__) && HAS_BFLOAT16_PRODUCTS && __has_include(<amxtileintrin.h>)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

#define TILE_ROWS 16
#define TILE_BYTES 64                          /* bytes of a row */
#define INPUTS 32                              /* inputs of a step: the bfloat16 numbers of a row */
#define INT8_INPUTS TILE_BYTES
#define HALF (TILE_BYTES / (int)sizeof(float)) /* outputs of a tile */

/* Numbers of the registers. */
enum { SUMS = 0, ROWS_OF_INPUTS = 4, WEIGHTS = 6 };

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row, for each register */
    uint8_t rows[16];
} Shapes;

typedef struct {
    uint8_t rows[8];
    uint16_t bytes[8]; /* of a row */
    uint8_t data[8][TILE_ROWS][TILE_BYTES];
} Emulated;

/* The shapes of this thread's registers, as `configure` numbers them, 0 for none. */
extern _Thread_local int pilotfish_configured;

#if HAS_TILES
#define REAL(...) __asm__ volatile(__VA_ARGS__)
#else
#define REAL(...) (void)0
#endif

static inline void load_emulated(Emulated *tiles, int to, const void *from, int64_t stride)
{
    for (int r = 0; r < tiles->rows[to]; r++) memcpy(tiles->data[to][r], (const char *)from + r * stride, tiles->bytes[to]);
}

static inline void store_emulated(const Emulated *tiles, int from, void *to, int64_t stride)
{
    for (int r = 0; r < tiles->rows[from]; r++) memcpy((char *)to + r * stride, tiles->data[from][r], tiles->bytes[from]);
}

static inline void multiply_int8_emulated(Emulated *tiles, int to, int rows, int weights)
{
    for (int r = 0; r < tiles->rows[to]; r++) {
        const int8_t *x = (const int8_t *)tiles->data[rows][r];
        int32_t *sums = (int32_t *)tiles->data[to][r];
        for (int output = 0; output < HALF; output++)
            for (int k = 0; k < tiles->bytes[rows]; k++)
                sums[output] += x[k] * ((const int8_t *)tiles->data[weights][k / 4])[4 * output + k % 4];
    }
}

static inline void multiply_emulated(Emulated *tiles, int to, int rows, int weights)
{
    for (int r = 0; r < tiles->rows[to]; r++) {
        const uint16_t *x = (const uint16_t *)tiles->data[rows][r];
        float *sums = (float *)tiles->data[to][r];
        for (int output = 0; output < HALF; output++) {
            float even = 0.0f, odd = 0.0f;
            for (int pair = 0; pair < tiles->bytes[rows] / 4; pair++) {
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
#define MULTIPLY_INT8(TO, X, W)                                                                                        \
    do {                                                                                                               \
        if (emulated) multiply_int8_emulated(emulated, TO, X, W);                                                      \
        else REAL("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(TO), "i"(X), "i"(W));                                   \
    } while (0)

/* Give the registers their shapes: `first` and `second` rows of inputs, 0 of the second if there are few, each of `bytes`. */
static inline void configure(Emulated *emulated, int first, int second, int bytes)
{
    const int number = (TILE_GROUP * bytes + first) * TILE_GROUP + second;
    if (!emulated && pilotfish_configured == number) return;
    Shapes shapes = {.palette = 1};
    const int rows[8] = {first, first, second, second, first, second, bytes / 4, bytes / 4};
    const int widths[8] = {[ROWS_OF_INPUTS] = bytes, [ROWS_OF_INPUTS + 1] = bytes};
    for (int t = 0; t < 8; t++) {
        shapes.rows[t] = (uint8_t)rows[t];
        shapes.bytes[t] = (uint16_t)(!rows[t] ? 0 : widths[t] ? widths[t] : TILE_BYTES);
    }
    if (emulated) {
        memcpy(emulated->rows, shapes.rows, sizeof emulated->rows);
        memcpy(emulated->bytes, shapes.bytes, sizeof emulated->bytes);
        return;
    }
    REAL("ldtilecfg %0" ::"m"(shapes));
    pilotfish_configured = number;
}

#endif
