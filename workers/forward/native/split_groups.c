/* Products of 4-bit and 8-bit integers in groups with activations that are rounded to integers of 16 bits.

   The inputs of a row's group share a step, so that one large activation makes no other group coarse. Each input is an integer
   of 16 bits. Sums of integers are exact, so tile registers (group_tiles.c), which multiply a coarse int8 number and a fine one,
   and vectors find the same ones, whatever the number of rows. A group's sum is then a float, and scale, zero and minimum are
   applied to it as in groups.c, group after group.

   VNNI multiplies integers of 16 bits, two for every sum. Weights are widened to them once for as many rows as have sums that
   fit the registers. Those rows read the weights from memory once. */

#include <omp.h>
#include <stddef.h>

#include "finish.h"
#include "registers.h"
#include "split_groups.h"

#define LARGEST 32512.0f   /* of the integers: 127 coarse steps */
#define TILE_ROW 64        /* inputs that a row of a tile register holds */
#define MOST_GROUP 128     /* inputs of a group: 32 bits hold its sums */
#define CHUNK (256 * 1024) /* bytes of split rows of a chunk */
#define LEAST_ROWS 16      /* rows of a chunk at least: those of a tile register, twice */
#define MOST_ROWS 128
#define ON_TILES 28        /* rows from which on tile registers are faster than vectors; they are for LEAST_ROWS, too */
#define AHEAD 4096         /* bytes of weights to prefetch */

int pilotfish_splits_groups(int64_t group)
{
    return (pilotfish_has_tiles() || HAS_VNNI) && group % WORD == 0 && (group <= TILE_ROW || group == MOST_GROUP);
}

/* --- the inputs ------------------------------------------------------------------------------- */

/* Split `count` inputs for tile registers: each WORD of them becomes its even ones and then its odd ones. Returns their sum. */
static int32_t split_integers(const float *x, int64_t count, float factor, int8_t *coarse, int8_t *fine)
{
    int64_t i = 0;
    int32_t sum = 0;
#if defined(IS_AVX512)
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    __m512i lanes = _mm512_setzero_si512();
    for (; i + LANES <= count; i += LANES) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(factor)));
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(1 << (COARSE_BITS - 1))), COARSE_BITS);
        _mm_storeu_si128((__m128i *)(coarse + i), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(high), order));
        _mm_storeu_si128((__m128i *)(fine + i), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(whole), order)); /* the low 8 bits */
        lanes = _mm512_add_epi32(lanes, whole);
    }
    sum = _mm512_reduce_add_epi32(lanes);
#endif
    for (; i < count; i++) {
        const int32_t whole = (int32_t)rintf(x[i] * factor), high = (whole + (1 << (COARSE_BITS - 1))) >> COARSE_BITS;
        const int64_t to = i / WORD * WORD + i % 2 * (WORD / 2) + i % WORD / 2;
        coarse[to] = (int8_t)high, fine[to] = (int8_t)(whole - high * (1 << COARSE_BITS));
        sum += whole;
    }
    return sum;
}

#if HAS_VNNI
/* Round `count` inputs for vectors: of each WORD, the pairs in the order in which `widened` returns their weights. Returns their
   sum. */
static int32_t round_integers(const float *x, int64_t count, float factor, int8_t *to)
{
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, 2, 3, 10, 11, 6, 7, 14, 15));
    const __m512 factors = _mm512_set1_ps(factor);
    __m512i lanes = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += LANES) { /* WORD or 2 * WORD at a time */
        const __mmask16 some = count - i < LANES ? (__mmask16)((1 << (count - i)) - 1) : 0xffff;
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(some, x + i), factors));
        const __m256i ordered = _mm256_shuffle_epi8(_mm512_cvtepi32_epi16(whole), order);
        if (some == 0xffff) _mm256_storeu_si256((__m256i *)(to + 2 * i), ordered);
        else _mm_storeu_si128((__m128i *)(to + 2 * i), _mm256_castsi256_si128(ordered));
        lanes = _mm512_add_epi32(lanes, whole);
    }
    return _mm512_reduce_add_epi32(lanes);
}
#else
#define round_integers(X, COUNT, FACTOR, TO) 0
#endif

/* Split `count` inputs into coarse and fine bfloat16 numbers in the order of `round_integers`. Returns their sum. */
static int32_t split_floats(const float *x, int64_t count, float factor, uint16_t *coarse, uint16_t *fine)
{
    int32_t sum = 0;
#if HAS_VNNI
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, 2, 3, 10, 11, 6, 7, 14, 15));
    const __m512i half = _mm512_set1_epi32(1 << (COARSE_BITS - 1)), mask = _mm512_set1_epi32(-(1 << COARSE_BITS));
    __m512i lanes = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += LANES) { /* WORD or 2 * WORD at a time */
        const __mmask16 some = count - i < LANES ? (__mmask16)((1 << (count - i)) - 1) : 0xffff;
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(some, x + i), _mm512_set1_ps(factor)));
        const __m512i high = _mm512_and_si512(_mm512_add_epi32(whole, half), mask), low = _mm512_sub_epi32(whole, high);
        const __m512i to_high = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(high)), 16);
        const __m512i to_low = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(low)), 16);
        const __m256i first = _mm256_shuffle_epi8(_mm512_cvtepi32_epi16(to_high), order);
        const __m256i second = _mm256_shuffle_epi8(_mm512_cvtepi32_epi16(to_low), order);
        _mm256_mask_storeu_epi16(coarse + i, some, first);
        _mm256_mask_storeu_epi16(fine + i, some, second);
        lanes = _mm512_add_epi32(lanes, whole);
    }
    sum = _mm512_reduce_add_epi32(lanes);
#else
    for (int64_t i = 0; i < count; i++) {
        const int32_t whole = (int32_t)rintf(x[i] * factor);
        const int32_t high = (whole + (1 << (COARSE_BITS - 1))) >> COARSE_BITS << COARSE_BITS;
        const int64_t j = i % WORD, to = i - j + 2 * (j % 2 * 2 + j % 4 / 2) + j / 4;
        coarse[to] = narrow_bfloat16((float)high), fine[to] = narrow_bfloat16((float)(whole - high));
        sum += whole;
    }
#endif
    return sum;
}

/* The largest absolute value, or a number that is not finite. */
static float largest_of(const float *x, int64_t count)
{
    uint32_t largest = 0; /* absolute values, whose bits are in their order */
    float most;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    memcpy(&most, &largest, sizeof most);
    return most;
}

INLINE int64_t number_size(const Path path)
{
    return path == BFLOAT16_NUMBERS ? 2 * sizeof(uint16_t) : sizeof(uint16_t);
}

/* Make integers of the rows. */
static void split_rows(const Matrix *matrix, const float *x, int64_t rows, const SplitGroups *to, const Path path)
{
    const int64_t group = matrix->group, groups = groups_of(matrix), bytes = number_size(path) * group;
    for (int64_t r = 0; r < rows; r++, x += matrix->inputs)
        for (int64_t g = 0; g < groups; g++) {
            const int64_t at = r * groups + g, first = g * group;
            const int64_t some = matrix->inputs - first < group ? matrix->inputs - first : group;
            int8_t *numbers = to->numbers + bytes * (g * to->rows + (path == BFLOAT16_NUMBERS ? r / TILE_ROWS * TILE_ROWS : r));
            uint16_t *coarse = (uint16_t *)numbers + r % TILE_ROWS * group, *fine = coarse + TILE_ROWS * group;
            const float *own = x + first;
            float values[MOST_GROUP];
            if (matrix->order || some < group) {
                for (int64_t i = 0; i < some; i++) values[i] = matrix->order ? x[matrix->order[first + i]] : own[i];
                for (int64_t i = some; i < group; i++) values[i] = 0.0f;
                own = values;
            }
            const float most = largest_of(own, group), step = most / LARGEST, factor = step > 0.0f ? 1.0f / step : 0.0f;
            int32_t sum = 0;
            if (most < INFINITY && factor < INFINITY) {
                if (path == INT8_NUMBERS) sum = split_integers(own, group, factor, numbers, numbers + group);
                else if (path == BFLOAT16_NUMBERS)
                    sum = split_floats(own, group, factor, coarse, fine);
                else sum = round_integers(own, group, factor, numbers);
                to->steps[at] = step;
            } else { /* zeros instead of numbers near the smallest one; infinity or NaN has no integers: all sums are NaN */
                if (path != BFLOAT16_NUMBERS) memset(numbers, 0, (size_t)bytes);
                else memset(coarse, 0, (size_t)bytes / 2), memset(fine, 0, (size_t)bytes / 2);
                to->steps[at] = most < INFINITY ? 0.0f : NAN;
            }
            to->sums[at] = (float)sum * to->steps[at];
        }
    memset(to->steps + rows * groups, 0, (size_t)((to->rows - rows) * groups) * sizeof *to->steps); /* rows that are idle */
    memset(to->sums + rows * groups, 0, (size_t)((to->rows - rows) * groups) * sizeof *to->sums);
}

/* --- vectors ---------------------------------------------------------------------------------- */

#if HAS_VNNI
#define VECTOR_ROWS 12 /* most rows whose sums fit the registers */
#define MOST_PARTS (WORD / 2)
#define EACH_SIZE(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12)

/* Add the products of two inputs and weights of each output. Written as assembly because GCC 12 copies every sum of the
   intrinsic from register to register. */
#define ADD_PRODUCTS(SUM, WEIGHTS, TWO) __asm__("vpdpwssd %2, %1, %0" : "+v"(SUM) : "v"(WEIGHTS), "v"(TWO))

INLINE __m512i two_inputs(const int8_t *from)
{
    int32_t two;
    memcpy(&two, from, sizeof two);
    return _mm512_set1_epi32(two);
}

/* The weights of one pair of inputs, from a line of packed ones: [LANES, 2] integers of 16 bits. */
INLINE __m512i widened(__m512i line, const int pair, const int64_t kind)
{
    if (kind == GROUPS4_TILES)
        return _mm512_and_si512(_mm512_srli_epi32(line, pair % 2 * 8 + pair / 2 * 4), _mm512_set1_epi32(0x000f000f));
    return _mm512_srai_epi16(pair ? line : _mm512_slli_epi16(line, 8), 8);
}

/* Multiply `rows` rows from `first` on with a block, and apply the operations after the product. */
INLINE void multiply_rows(const Matrix *matrix, const SplitGroups *input, const Output *output, int64_t block, int64_t row,
                          int64_t first, const int64_t kind, const int rows)
{
    const int64_t group = matrix->group, groups = groups_of(matrix), bytes = group_bytes(matrix), before = head_bytes(matrix);
    const int pairs = kind == GROUPS4_TILES ? WORD / 2 : WORD / 4; /* of inputs, in a line */
    const int parts = rows == 1 ? pairs : rows <= 4 ? 2 : 1;       /* of a sum, so that products of few rows need not wait */
    Place place = place_of(matrix, block, 0);
    char unpacked[MOST_UNPACKED] __attribute__((aligned(LINE)));
    Head units;
    Vector total[VECTOR_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) total[r][0] = total[r][1] = (Vector){0};
    for (int64_t g = 0; g < groups; g++, move_to_next(matrix, bytes, &place)) {
        const int8_t *x = input->numbers + 2 * group * (g * input->rows + first);
        const char *lines = place.group + before;
        if (matrix->planes) pilotfish_unpack_planes(matrix, lines, unpacked), lines = unpacked;
        __m512i sum[VECTOR_ROWS][2][MOST_PARTS];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int part = 0; part < parts; part++) sum[r][0][part] = sum[r][1][part] = _mm512_setzero_si512();
        for (int64_t i = 0; i < group; i += 2 * pairs, lines += 2 * LINE, x += 4 * pairs) {
            __builtin_prefetch(lines + AHEAD, 0, 3);
            __builtin_prefetch(lines + AHEAD + LINE, 0, 3);
            const __m512i left = _mm512_loadu_si512(lines), right = _mm512_loadu_si512(lines + LINE);
#pragma GCC unroll 4
            for (int pair = 0; pair < pairs; pair++) {
                const __m512i to_left = widened(left, pair, kind), to_right = widened(right, pair, kind);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) {
                    const __m512i two = two_inputs(x + 2 * r * group + 4 * pair);
                    ADD_PRODUCTS(sum[r][0][pair % parts], to_left, two);
                    ADD_PRODUCTS(sum[r][1][pair % parts], to_right, two);
                }
            }
        }
        for (int64_t line = 0; line < before; line += LINE) __builtin_prefetch(place.group + AHEAD + line, 0, 3);
        if (matrix->super && place.left == matrix->super) units = units_of(matrix, place.units);
        const Head head = matrix->super ? head_of_integers(matrix, place.group, &units) : head_of_numbers(matrix, place.group);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const int64_t own = (first + r) * groups + g;
#pragma GCC unroll 4
            for (int part = 1; part < parts; part++)
                for (int half = 0; half < 2; half++) sum[r][half][0] = _mm512_add_epi32(sum[r][half][0], sum[r][half][part]);
            apply_integers(&head, matrix->offset, input->steps[own], input->sums[own], (Words)sum[r][0][0], (Words)sum[r][1][0],
                           total[r]);
        }
    }
    Vector done[VECTOR_ROWS][2]; /* a copy, so that the sums themselves stay in registers */
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) done[r][0] = total[r][0], done[r][1] = total[r][1];
#pragma GCC unroll 1
    for (int r = 0; r < rows; r++) finish(matrix, output, block, row + first + r, done[r][0], done[r][1]);
}

typedef void RowsFunction(const Matrix *matrix, const SplitGroups *input, const Output *output, int64_t block, int64_t row,
                          int64_t first);

#define DEFINE(KIND, ROWS)                                                                                             \
    static void multiply_##KIND##_##ROWS(const Matrix *matrix, const SplitGroups *input, const Output *output,         \
                                         int64_t block, int64_t row, int64_t first)                                    \
    {                                                                                                                  \
        multiply_rows(matrix, input, output, block, row, first, KIND, ROWS);                                           \
    }
#define DEFINE_KINDS(ROWS) DEFINE(GROUPS4_TILES, ROWS) DEFINE(GROUPS8_TILES, ROWS)
EACH_SIZE(DEFINE_KINDS)

#define FUNCTIONS(ROWS) {multiply_GROUPS4_TILES_##ROWS, multiply_GROUPS8_TILES_##ROWS},
static RowsFunction *const functions[][2] = {EACH_SIZE(FUNCTIONS)};

static void multiply_on_vectors(const Matrix *matrix, const SplitGroups *input, const Output *output, int64_t block, int64_t row,
                                int64_t rows)
{
    const int64_t kind = matrix->kind - GROUPS4_TILES, parts = (rows + VECTOR_ROWS - 1) / VECTOR_ROWS;
    for (int64_t part = 0; part < parts; part++) { /* parts of rows whose sizes differ by at most one */
        const int64_t first = rows * part / parts, size = rows * (part + 1) / parts - first;
        functions[size - 1][kind](matrix, input, output, block, row, first);
    }
}
#else
#define multiply_on_vectors(MATRIX, INPUT, OUTPUT, BLOCK, ROW, ROWS) ((void)0)
#endif

/* --- a thread's share --------------------------------------------------------------------------- */

/* Rows in whole parts of those that BFLOAT16_NUMBERS are multiplied for. */
static int64_t whole_parts(int64_t rows)
{
    return (rows + TILE_GROUP - 1) / TILE_GROUP * TILE_GROUP;
}

static Path path_of(const Matrix *matrix, int64_t rows)
{
    const int is_small = matrix->kind == GROUPS4_TILES && matrix->group <= SMALL_GROUP;
    if (pilotfish_has_tiles() && is_small && 10 * rows >= 7 * whole_parts(rows)) return BFLOAT16_NUMBERS; /* of 10 rows 3 may be idle */
    if (HAS_VNNI && !(pilotfish_has_tiles() && (rows >= ON_TILES || rows == LEAST_ROWS))) return VECTORS;
    return INT8_NUMBERS;
}

/* Each thread splits the rows of a chunk for itself. */
void pilotfish_multiply_split_groups(const Matrix *matrix, const float *input, const Output *output, int64_t rows, int64_t team)
{
    const int64_t groups = groups_of(matrix), width = groups * matrix->group, fitting = CHUNK / (2 * width);
    const int64_t bounded = fitting < MOST_ROWS ? fitting : MOST_ROWS;
    const int64_t most = bounded >= TILE_GROUP ? bounded / TILE_GROUP * TILE_GROUP : bounded > LEAST_ROWS ? bounded : LEAST_ROWS;
    const int64_t chunks = (rows + most - 1) / most, size = (rows + chunks - 1) / chunks;
    const int64_t items = chunks * matrix->blocks, thread = omp_get_thread_num(), end = items * (thread + 1) / team;
    const int is_wide = path_of(matrix, size) == BFLOAT16_NUMBERS || path_of(matrix, rows / chunks) == BFLOAT16_NUMBERS;
    const int64_t room = is_wide ? whole_parts(size) : size; /* chunks differ by at most one row */
    int8_t numbers[(is_wide ? 2 : 1) * (int64_t)sizeof(uint16_t) * room * width] __attribute__((aligned(LINE)));
    float steps[room * groups], sums[room * groups];
    SplitGroups split = {0, numbers, steps, sums};
    for (int64_t item = items * thread / team, known = -1; item < end; item++) {
        const int64_t chunk = item / matrix->blocks, block = item % matrix->blocks;
        const int64_t row = rows * chunk / chunks, some = rows * (chunk + 1) / chunks - row;
        const Path path = path_of(matrix, some);
        split.rows = path == BFLOAT16_NUMBERS ? whole_parts(some) : some;
        if (chunk != known) split_rows(matrix, input + row * matrix->inputs, some, &split, path);
        known = chunk;
        if (path == BFLOAT16_NUMBERS) pilotfish_multiply_small_groups_on_tiles(matrix, &split, output, block, row, some);
        else if (path == INT8_NUMBERS) pilotfish_multiply_groups_on_tiles(matrix, &split, output, block, row, some);
        else multiply_on_vectors(matrix, &split, output, block, row, some);
    }
    pilotfish_leave_tiles();
}
