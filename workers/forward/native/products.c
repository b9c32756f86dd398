/* Products of activations with packed weights, for one row and for thousands.

   A tile is a block of COLUMNS outputs times a group of rows: as many as have their sums in registers. Each tile reads
   the block's weights once. Few rows are one group, so memory is read once, in order. Many rows are cut into chunks
   whose activations fit the second-level cache; a block's weights are then read from that cache by all groups but the
   first. Products on tile registers are cut in the same way, with larger groups: see tiles.c.

   Every output is summed over the inputs in one fixed order, whatever the number of rows and threads. */

#include <omp.h>
#include <sched.h>
#include <stddef.h>

#include "finish.h"
#include "groups.h"
#include "split_groups.h"
#include "tiles.h"

#if defined(IS_AVX512) || defined(IS_AVX2)
#include <immintrin.h>
#endif

#if REGISTERS == 32
#define ROWS 12 /* most rows of a tile: their sums, a block's two vectors and a factor fit the registers */
#define SLOW_ROWS 6 /* rows from which on a tile reads its weights so slowly that they are prefetched to the second level */
#define EACH_SIZE(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12)
#else
#define ROWS 6
#define SLOW_ROWS 7 /* none: not measured */
#define EACH_SIZE(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)
#endif
#define SPINS 4000         /* spins that a thread waits for the others before it yields its core */
#define AHEAD 8192         /* bytes of weights to prefetch where the processor's own prefetcher does not reach far enough */
#define CHUNK (256 * 1024) /* bytes of activations of a chunk of rows */
#define TILE_CHUNK (768 * 1024) /* the same for products on tiles */
#define SIDE_BY_SIDE 4     /* blocks of int8 weights that are read together by one row: one block alone waits for its sums */

void pilotfish_wait_for_all(Barrier *barrier)
{
    const int generation = atomic_load_explicit(&barrier->generation, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&barrier->arrived, 1, memory_order_acq_rel) == barrier->team - 1) {
        atomic_store_explicit(&barrier->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&barrier->generation, generation + 1, memory_order_release);
        return;
    }
    for (int waited = 0; atomic_load_explicit(&barrier->generation, memory_order_acquire) == generation; waited++)
        if (waited > SPINS) sched_yield();
}

/* --- tiles ----------------------------------------------------------------------------------- */

/* The first of the tile's blocks, its first row, the number of this reading of the weights, and the number of readings. */
typedef struct {
    int64_t block, row, reading, readings;
} Tile;

/* The weights to prefetch. If a block is read several times, each reading prefetches its share of the next block, so
   that memory is read evenly and not only during the first reading. */
typedef struct {
    const char *at;
    int64_t stride; /* bytes for each pair of vectors */
} Prefetch;

INLINE Prefetch prefetch_plan(const void *weights, int64_t bytes, int64_t stride, const Tile *tile)
{
    if (tile->readings == 1) return (Prefetch){(const char *)weights + AHEAD, stride};
    return (Prefetch){(const char *)weights + bytes + tile->reading * bytes / tile->readings,
                      (stride + tile->readings - 1) / tile->readings};
}

/* Prefetch a line, and the next one if the stride has two. With many rows, lines that wait for memory would occupy the few
   buffers through which the first-level cache reads the second one, and be evicted before they are used. */
INLINE void prefetch_next(Prefetch *next, const int rows)
{
    if (rows >= SLOW_ROWS) {
        __builtin_prefetch(next->at, 0, 2);
        if (next->stride > LINE) __builtin_prefetch(next->at + LINE, 0, 2);
    } else {
        __builtin_prefetch(next->at, 0, 3);
        if (next->stride > LINE) __builtin_prefetch(next->at + LINE, 0, 3);
    }
    next->at += next->stride;
}

/* Pointers to the next factors of a tile's rows. Three rows share a pointer, because a pointer for each would not fit the
   registers; the compiler must not know how they move, or it makes pointers of its own for all rows. */
typedef struct {
    const char *of_rows[(ROWS + 2) / 3];
    int64_t stride; /* bytes from row to row */
} Factors;

INLINE Factors factors_of(const void *input, int64_t row, int64_t row_bytes)
{
    Factors factors = {.stride = row_bytes};
    for (int i = 0; i < (ROWS + 2) / 3; i++) factors.of_rows[i] = (const char *)input + (row + 3 * i) * row_bytes;
    return factors;
}

INLINE const void *factor(const Factors *factors, int row)
{
    return factors->of_rows[row / 3] + row % 3 * factors->stride;
}

INLINE void move_on(Factors *factors, const int rows, int64_t bytes)
{
#pragma GCC unroll 4
    for (int i = 0; i < (rows + 2) / 3; i++) {
        factors->of_rows[i] += bytes;
        __asm__("" : "+r"(factors->of_rows[i]));
    }
}

INLINE void add_products(const Factors *factors, const int rows, Vector first, Vector second, Vector sum[][2])
{
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        const float x = *(const float *)factor(factors, r);
        sum[r][0] += first * x;
        sum[r][1] += second * x;
    }
}

/* Add the products of `rows` rows and one block to `sum`. */
INLINE void rows_float32(const Matrix *matrix, const void *input, const Tile *tile, const int rows, Vector sum[][2])
{
    const int64_t inputs = matrix->inputs, bytes = COLUMNS * (int64_t)sizeof(float);
    const float *weights = (const float *)matrix->weights + tile->block * inputs * COLUMNS;
    Prefetch next = prefetch_plan(weights, inputs * bytes, bytes, tile);
    Factors x = factors_of(input, tile->row, inputs * (int64_t)sizeof(float));
    for (int64_t k = 0; k < inputs; k++, weights += COLUMNS) {
        prefetch_next(&next, rows);
        add_products(&x, rows, *(const Vector *)weights, *(const Vector *)(weights + LANES), sum);
        move_on(&x, rows, sizeof(float));
    }
}

INLINE Vector widen_bytes(const int8_t *from)
{
#if defined(IS_AVX512)
    return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(IS_AVX2)
    return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    Vector wide;
    for (int l = 0; l < LANES; l++) wide[l] = (float)from[l];
    return wide;
#endif
}

/* The same for `blocks` neighbouring blocks; the sums of a block's rows follow those of the block before. */
INLINE void rows_int8(const Matrix *matrix, const void *input, const Tile *tile, const int rows, const int blocks, Vector sum[][2])
{
    const int64_t inputs = matrix->inputs, bytes = inputs * COLUMNS;
    const int8_t *weights = (const int8_t *)matrix->weights + tile->block * bytes;
    Prefetch next = prefetch_plan(weights, bytes, COLUMNS, tile);
    Factors x = factors_of(input, tile->row, inputs * (int64_t)sizeof(float));
    for (int64_t k = 0; k < inputs; k++, weights += COLUMNS) {
        if (blocks > 1 && k * COLUMNS + AHEAD == bytes) next.at += (blocks - 1) * bytes; /* the heads of the next blocks */
#pragma GCC unroll 4
        for (int b = 0; b < blocks; b++) {
            __builtin_prefetch(next.at + b * bytes, 0, 3);
            add_products(&x, rows, widen_bytes(weights + b * bytes), widen_bytes(weights + b * bytes + LANES), sum + b * rows);
        }
        next.at += next.stride;
        move_on(&x, rows, sizeof(float));
    }
}

#if HAS_BFLOAT16_PRODUCTS
INLINE Vector two_products(Vector sum, Words weights, uint32_t pair)
{
#if defined(__AVX512BF16__) && defined(IS_AVX512)
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32((int)pair));
#else
    sum += (Vector)(weights & 0xffff0000u) * widen_bfloat16((uint16_t)(pair >> 16));
    return sum + (Vector)(weights << 16) * widen_bfloat16((uint16_t)pair);
#endif
}

INLINE void rows_bfloat16(const Matrix *matrix, const void *input, const Tile *tile, const int rows, Vector sum[][2])
{
    const int64_t pairs = matrix->inputs / 2, bytes = COLUMNS * (int64_t)sizeof(uint32_t);
    const uint32_t *weights = (const uint32_t *)matrix->weights + tile->block * pairs * COLUMNS;
    Prefetch next = prefetch_plan(weights, pairs * bytes, bytes, tile);
    Factors x = factors_of(input, tile->row, pairs * (int64_t)sizeof(uint32_t));
    for (int64_t k = 0; k < pairs; k++, weights += COLUMNS) {
        prefetch_next(&next, rows);
        const Words first = *(const Words *)weights, second = *(const Words *)(weights + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const uint32_t pair = *(const uint32_t *)factor(&x, r);
            sum[r][0] = two_products(sum[r][0], first, pair);
            sum[r][1] = two_products(sum[r][1], second, pair);
        }
        move_on(&x, rows, sizeof(uint32_t));
    }
}
#else
INLINE void rows_bfloat16(const Matrix *matrix, const void *input, const Tile *tile, const int rows, Vector sum[][2])
{
    const int64_t inputs = matrix->inputs, bytes = COLUMNS * (int64_t)sizeof(uint32_t);
    const uint32_t *weights = (const uint32_t *)matrix->weights + tile->block * inputs / 2 * COLUMNS;
    Prefetch next = prefetch_plan(weights, inputs / 2 * bytes, bytes, tile);
    Factors x = factors_of(input, tile->row, inputs * (int64_t)sizeof(float));
    for (int64_t k = 0; k < inputs; k += 2, weights += COLUMNS) {
        prefetch_next(&next, rows);
        const Words first = *(const Words *)weights, second = *(const Words *)(weights + LANES);
        add_products(&x, rows, (Vector)(first << 16), (Vector)(second << 16), sum); /* of a pair, the lower half is even */
        move_on(&x, rows, sizeof(float));
        add_products(&x, rows, (Vector)(first & 0xffff0000u), (Vector)(second & 0xffff0000u), sum);
        move_on(&x, rows, sizeof(float));
    }
}
#endif

INLINE void compute_tile(const Matrix *matrix, const void *input, const Output *output, const Tile *tile, const int64_t kind,
                         const int rows, const int blocks)
{
    Vector sum[ROWS][2];
#pragma GCC unroll 12
    for (int s = 0; s < rows * blocks; s++) sum[s][0] = sum[s][1] = (Vector){0};
    if (kind == BFLOAT16) rows_bfloat16(matrix, input, tile, rows, sum);
    else if (kind == INT8) rows_int8(matrix, input, tile, rows, blocks, sum);
    else rows_float32(matrix, input, tile, rows, sum);
    Vector done[ROWS][2]; /* a copy, so that the sums themselves stay in registers */
#pragma GCC unroll 12
    for (int s = 0; s < rows * blocks; s++) done[s][0] = sum[s][0], done[s][1] = sum[s][1];
#pragma GCC unroll 1
    for (int s = 0; s < rows * blocks; s++)
        finish(matrix, output, tile->block + s / rows, tile->row + s % rows, done[s][0], done[s][1]);
}

typedef void TileFunction(const Matrix *matrix, const void *input, const Output *output, const Tile *tile);

#define DEFINE(KIND, SIZE)                                                                                             \
    static void tile_##KIND##_##SIZE(const Matrix *matrix, const void *input, const Output *output, const Tile *tile)  \
    {                                                                                                                  \
        compute_tile(matrix, input, output, tile, KIND, SIZE, 1);                                                      \
    }
#define DEFINE_ALL(SIZE) DEFINE(FLOAT32, SIZE) DEFINE(BFLOAT16, SIZE) DEFINE(INT8, SIZE)
EACH_SIZE(DEFINE_ALL)

static void tile_side_by_side(const Matrix *matrix, const void *input, const Output *output, const Tile *tile)
{
    compute_tile(matrix, input, output, tile, INT8, 1, SIDE_BY_SIDE);
}

#define FLOAT32_TILE(SIZE) tile_FLOAT32_##SIZE,
#define BFLOAT16_TILE(SIZE) tile_BFLOAT16_##SIZE,
#define INT8_TILE(SIZE) tile_INT8_##SIZE,
static TileFunction *const tile_functions[][ROWS] = {{EACH_SIZE(FLOAT32_TILE)}, {EACH_SIZE(BFLOAT16_TILE)}, {EACH_SIZE(INT8_TILE)}};

/* --- a thread's share ------------------------------------------------------------------------ */

/* The rows of one chunk times one block: groups of rows whose sizes differ by at most one. */
static void multiply_block(const Matrix *matrix, const void *input, const Output *output, int64_t block, int64_t row, int64_t rows)
{
    const int64_t readings = (rows + ROWS - 1) / ROWS, end = row + rows;
    for (int64_t reading = 0; reading < readings; reading++) {
        const Tile tile = {block, row, reading, readings};
        const int64_t size = (end - row + readings - reading - 1) / (readings - reading);
        tile_functions[matrix->kind][size - 1](matrix, input, output, &tile);
        row += size;
    }
}

/* This thread's share of a product on tiles: of the groups of rows of all blocks, chunk by chunk and block by block. */
static void multiply_on_tiles(const Matrix *matrix, const void *input, const Output *output, int64_t rows, int64_t team)
{
    const int64_t fitting = TILE_CHUNK / (matrix->inputs * (int64_t)sizeof(uint16_t)) / TILE_GROUP * TILE_GROUP;
    const int64_t most = fitting < TILE_GROUP ? TILE_GROUP : fitting < MOST_TILE_ROWS ? fitting : MOST_TILE_ROWS;
    const int64_t groups = (rows + TILE_GROUP - 1) / TILE_GROUP, thread = omp_get_thread_num();
    int64_t group = groups * matrix->blocks * thread / team, end = groups * matrix->blocks * (thread + 1) / team;
    Pending pending;
    pending.rows = pending.turn = 0;
    for (int64_t row = 0; row < rows; row += most) {
        const int64_t here = rows - row < most ? rows - row : most, of_block = (here + TILE_GROUP - 1) / TILE_GROUP;
        for (; group < end && group < of_block * matrix->blocks;) {
            const int64_t block = group / of_block, first = group % of_block;
            const int64_t last = first + end - group < of_block ? first + end - group : of_block;
            const int64_t some = last * TILE_GROUP < here ? (last - first) * TILE_GROUP : here - first * TILE_GROUP;
            pilotfish_multiply_on_tiles(matrix, input, output, block, row + first * TILE_GROUP, some, &pending);
            group += last - first;
        }
        group -= of_block * matrix->blocks;
        end -= of_block * matrix->blocks;
        if (group < 0) group = 0;
    }
    pilotfish_finish_pending(&pending);
}

/* This thread's share of a product with INT8_TILES weights. Each thread splits the rows for itself. */
static void multiply_split(const Matrix *matrix, const float *input, const Output *output, int64_t rows, int64_t team)
{
    const int64_t inputs = matrix->inputs, fitting = CHUNK / (2 * inputs), most = fitting > TILE_GROUP / 2 ? fitting : TILE_GROUP / 2;
    const int64_t chunks = (rows + most - 1) / most, size = (rows + chunks - 1) / chunks;
    const int64_t items = chunks * matrix->blocks, thread = omp_get_thread_num(), end = items * (thread + 1) / team;
    int8_t numbers[2 * size * inputs] __attribute__((aligned(LINE)));
    int32_t excess[2 * size];
    float steps[size];
    const SplitRows split = {numbers, excess, steps};
    for (int64_t item = items * thread / team, known = -1; item < end; item++) {
        const int64_t chunk = item / matrix->blocks, row = rows * chunk / chunks, some = rows * (chunk + 1) / chunks - row;
        if (chunk != known) pilotfish_split_rows(input + row * inputs, some, inputs, &split);
        known = chunk;
        pilotfish_multiply_split(matrix, &split, output, item % matrix->blocks, row, some);
    }
}

void pilotfish_multiply_share(const Matrix *matrix, const void *input, const Output *output, int64_t rows, int64_t team)
{
    if (!rows) return;
    if (matrix->kind == GROUPS4_TILES || matrix->kind == GROUPS8_TILES) {
        pilotfish_multiply_split_groups(matrix, input, output, rows, team);
        return;
    }
    if (has_groups(matrix)) {
        pilotfish_multiply_groups(matrix, input, output, rows, team);
        return;
    }
    if (matrix->kind == INT8_TILES) {
        multiply_split(matrix, input, output, rows, team);
        pilotfish_leave_tiles();
        return;
    }
    if (pilotfish_on_tiles(matrix)) {
        multiply_on_tiles(matrix, input, output, rows, team);
        pilotfish_leave_tiles();
        return;
    }
    const int64_t size = factor_kind(matrix) == BFLOAT16 ? sizeof(uint16_t) : sizeof(float);
    const int64_t fitting = CHUNK / (matrix->inputs * size), most = fitting > ROWS ? fitting : ROWS;
    const int64_t chunks = (rows + most - 1) / most, items = chunks * matrix->blocks, thread = omp_get_thread_num();
    const int64_t end = items * (thread + 1) / team;
    for (int64_t item = items * thread / team; item < end; item++) {
        const int64_t chunk = item / matrix->blocks, block = item % matrix->blocks;
        if (rows == 1 && matrix->kind == INT8 && end - item >= SIDE_BY_SIDE) {
            const Tile tile = {block, 0, 0, 1};
            tile_side_by_side(matrix, input, output, &tile);
            item += SIDE_BY_SIDE - 1;
            continue;
        }
        const int64_t row = rows * chunk / chunks; /* chunks of nearly equal size, since threads have equal numbers of items */
        multiply_block(matrix, input, output, block, row, rows * (chunk + 1) / chunks - row);
    }
}

void pilotfish_multiply(const Matrix *matrix, const void *input, const Output *output, int64_t rows, Barrier *barrier)
{
    pilotfish_multiply_share(matrix, input, output, rows, barrier->team);
    pilotfish_wait_for_all(barrier);
}

void pilotfish_multiply_blocks(const Matrix *matrix, const void *input, const Output *output, int64_t rows,
                               const int32_t *blocks, int64_t count, Barrier *barrier)
{
    const int64_t thread = omp_get_thread_num(), end = count * (thread + 1) / barrier->team;
    Pending pending;
    pending.rows = pending.turn = 0;
    for (int64_t i = count * thread / barrier->team; i < end; i++) {
        if (!pilotfish_on_tiles(matrix)) multiply_block(matrix, input, output, blocks[i], 0, rows);
        for (int64_t row = 0; row < rows && pilotfish_on_tiles(matrix); row += MOST_TILE_ROWS) {
            const int64_t some = rows - row < MOST_TILE_ROWS ? rows - row : MOST_TILE_ROWS;
            pilotfish_multiply_on_tiles(matrix, input, output, blocks[i], row, some, &pending);
        }
    }
    pilotfish_finish_pending(&pending);
    if (pilotfish_on_tiles(matrix)) pilotfish_leave_tiles();
    pilotfish_wait_for_all(barrier);
}

/* --- rows of a packed matrix, unpacked: a head that is tied to the embedding serves as its table -------- */

void pilotfish_row(const Matrix *matrix, int64_t id, float *to)
{
    if (has_groups(matrix)) {
        pilotfish_row_of_groups(matrix, id, to);
        return;
    }
    const int64_t inputs = matrix->inputs, block = id / COLUMNS * inputs * COLUMNS, column = id % COLUMNS;
    if (matrix->kind == BFLOAT16) {
        const uint16_t *pairs = (const uint16_t *)matrix->weights + block;
        for (int64_t i = 0; i < inputs; i++) to[i] = widen_bfloat16(pairs[(i / 2 * COLUMNS + column) * 2 + i % 2]);
    } else {
        const float *values = (const float *)matrix->weights + block;
        for (int64_t i = 0; i < inputs; i++) to[i] = values[i * COLUMNS + column];
    }
}

/* to is [count, inputs] */
void pilotfish_rows(const Matrix *matrix, const int64_t *ids, float *to, int64_t count)
{
#pragma omp parallel for schedule(static) if (count > 1)
    for (int64_t i = 0; i < count; i++) pilotfish_row(matrix, ids[i], to + i * matrix->inputs);
}
