/* Products of activations with weights of 4 or 8 bits in groups: neighbouring inputs of an output share a scale.

   A weight is scale * (value - zero) or scale * value + minimum. A value is an integer, a float of 8 bits (E4M3: a sign, 4 bits
   of exponent, 3 of mantissa, no infinities), or 4 bits that choose a number from a table. Weights stay packed in memory; their
   values are widened in registers. The values of a group are summed with their inputs first, and scale, zero or minimum are
   applied to that sum and to the sum of the inputs. All sums are in single precision.

   Eight values of 4 bits are a word. A mask takes an integer of them without a shift, so it is 16^j too large; the input that it
   is multiplied with is divided by 16^j before, which is exact. E4M3 is half precision with other bounds: widened like it, it
   is 256 times too small, and its inputs are multiplied by 256. With many rows, a slice of a block is widened once for all of
   them, to the same numbers. Where the processor multiplies integers, split_groups.c takes those of 4 and 8 bits instead, if the
   packed matrix says so. Every output is summed in one fixed order, whatever the number of rows and threads, and all
   sums are written with `fused`, so that they have the same bits in every copy of the code. */

#include <omp.h>
#include <stddef.h>

#include "finish.h"
#include "groups.h"
#include "packed_groups.h"

/* FEW: most rows whose sums fit the registers beside a block's packed weights. FEWER: most times that a block is read from the
   caches for so many rows before widening it once is faster. MANY: the same beside widened weights.
   SEVERAL: numbers of rows and of the blocks that they read together, since one block alone would wait for its sums. */
#if REGISTERS == 32
#define FEW 10
#define FEWER 1
#define MANY 12
#define EACH_SEVERAL(DO) DO(1, 4) DO(2, 3) DO(3, 2)
#define EACH_FEW(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10)
#define EACH_MANY(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12)
#else
#define FEW 5
#define FEWER 2
#define MANY 6
#define EACH_SEVERAL(DO) DO(1, 3) DO(2, 2)
#define EACH_FEW(DO) DO(1) DO(2) DO(3) DO(4) DO(5)
#define EACH_MANY(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)
#endif
#if defined(IS_AVX512) || defined(IS_AVX2)
#define UNROLL _Pragma("GCC unroll 12")
#else
#define UNROLL _Pragma("GCC unroll 1")
#endif
#define MOST_SUMS (FEW < 6 ? 6 : FEW) /* rows times blocks */
#define MOST_BLOCKS 4
#define AHEAD 4096         /* bytes of weights to prefetch */
#define CHUNK (256 * 1024) /* bytes of activations of a chunk of rows */
#define MOST_ROWS 512      /* rows of a chunk */
#define SLICE 32           /* inputs whose weights are widened at a time */

/* --- values, widened -------------------------------------------------------------------------- */

/* LANES values of 8 bits; those of E4M3 divided by 256. */
INLINE Vector widen_bytes(const uint8_t *from, const int64_t kind)
{
    return kind == GROUPS8 ? floats(integers(from)) : widen_e4m3s(from);
}

/* 16 numbers in registers. */
typedef struct {
    Vector parts[16 / LANES];
} Table;

INLINE Table table_of(const Matrix *matrix, const int64_t kind)
{
    Table table = {{{0}}};
    if (kind == GROUPS_TABLE)
        for (int part = 0; part < 16 / LANES; part++) table.parts[part] = *(const Vector *)(matrix->table + part * LANES);
    return table;
}

/* The j-th value of each word. Integers are times 16^j; the last one times 1, since it would be negative. */
INLINE Vector value_of(Words words, const int j, const Table *table, const int64_t kind)
{
    if (kind == GROUPS4 && j == WORD - 1) return floats(words >> (4 * j));
    if (kind == GROUPS4) return floats(words & (0xfu << (4 * j)));
    const Words index = words >> (4 * j);
#if defined(IS_AVX512)
    return (Vector)_mm512_permutexvar_ps((__m512i)index, (__m512)table->parts[0]);
#elif defined(IS_AVX2)
    const __m256 low = _mm256_permutevar8x32_ps((__m256)table->parts[0], (__m256i)index);
    const __m256 high = _mm256_permutevar8x32_ps((__m256)table->parts[1], (__m256i)index);
    return (Vector)_mm256_blendv_ps(low, high, (__m256)(words << (28 - 4 * j))); /* by bit 3 of the index */
#else
    Vector chosen;
    for (int l = 0; l < LANES; l++) chosen[l] = table->parts[(index[l] & 0xf) / LANES][(index[l] & 0xf) % LANES];
    return chosen;
#endif
}

/* --- the inputs ------------------------------------------------------------------------------- */

/* Rows of inputs as they are multiplied, and the sums of each group's inputs. */
typedef struct {
    const float *values; /* [rows, groups * group] divided by what the values of the weights are too large */
    const float *sums;   /* [rows, groups] */
} Inputs;

static void prepare(const Matrix *matrix, const float *x, int64_t rows, float *values, float *sums)
{
    const int64_t group = matrix->group, groups = groups_of(matrix);
    static const float factor[WORD] = {1.0f, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1.0f};
    for (int64_t r = 0; r < rows; r++, x += matrix->inputs) {
        for (int64_t g = 0; g < groups; g++, values += group) {
            const int64_t left = matrix->inputs - g * group, some = left < group ? left : group;
            float lanes[WORD] = {0}, sum = 0.0f;
            for (int64_t i = 0; i < some; i++) values[i] = matrix->order ? x[matrix->order[g * group + i]] : x[g * group + i];
            for (int64_t i = some; i < group; i++) values[i] = 0.0f;
            int64_t i = 0;
            for (; i + WORD <= group; i += WORD)
                for (int l = 0; l < WORD; l++) lanes[l] += values[i + l];
            for (int l = 0; l < WORD; l++) sum += lanes[l];
            for (; i < group; i++) sum += values[i];
            *sums++ = sum;
            if (matrix->kind == GROUPS_E4M3)
                for (i = 0; i < group; i++) values[i] *= 256.0f;
            else if (matrix->kind == GROUPS4)
                for (i = 0; i < group; i += WORD)
                    for (int l = 0; l < WORD; l++) values[i + l] *= factor[l];
        }
    }
}

/* --- few rows: weights are widened in registers ------------------------------------------------ */

INLINE void add_values(const float *x, int64_t stride, const int rows, Vector first, Vector second, Vector sum[][2])
{
UNROLL
    for (int r = 0; r < rows; r++) {
        const Vector factor = same(x[r * stride]);
        sum[r][0] = fused(first, factor, sum[r][0]);
        sum[r][1] = fused(second, factor, sum[r][1]);
    }
}

/* Multiply `rows` rows with `blocks` neighbouring blocks. */
INLINE void multiply_few(const Matrix *matrix, const Inputs *inputs, const Output *output, int64_t block, int64_t row,
                         const int64_t kind, const int rows, const int blocks)
{
    const int64_t group = matrix->group, groups = groups_of(matrix), stride = groups * group;
    const int64_t bytes = group_bytes(matrix), before = head_bytes(matrix);
    const int64_t of_block = block_bytes(matrix), apart = matrix->planes ? MOST_UNPACKED : of_block; /* from block to block */
    Place place = place_of(matrix, block, 0);
    char unpacked[MOST_BLOCKS][MOST_UNPACKED] __attribute__((aligned(LINE)));
    const Table table = table_of(matrix, kind);
    Vector total[MOST_SUMS][2];
    for (int s = 0; s < rows * blocks; s++) total[s][0] = total[s][1] = (Vector){0};
    for (int64_t g = 0; g < groups; g++, move_to_next(matrix, bytes, &place)) {
        const float *x = inputs->values + g * group;
        const char *values = place.group + before;
        if (matrix->planes) {
            for (int b = 0; b < blocks; b++) pilotfish_unpack_planes(matrix, values + b * of_block, unpacked[b]);
            values = unpacked[0];
        }
        Vector sum[MOST_SUMS][2];
UNROLL
        for (int s = 0; s < rows * blocks; s++) sum[s][0] = sum[s][1] = (Vector){0};
        if (has_words(kind)) {
            const char *from = values;
            for (int64_t i = 0; i < group; i += WORD, from += COLUMNS * sizeof(uint32_t), x += WORD) {
                Words words[MOST_BLOCKS][2];
UNROLL
                for (int b = 0; b < blocks; b++) {
                    for (int line = 0; line < COLUMNS * (int)sizeof(uint32_t); line += LINE)
                        __builtin_prefetch(from + b * apart + AHEAD + line, 0, 3);
                    words[b][0] = *(const Words *)(from + b * apart);
                    words[b][1] = *(const Words *)(from + b * apart + LANES * sizeof(uint32_t));
                }
UNROLL
                for (int j = 0; j < WORD; j++)
UNROLL
                    for (int b = 0; b < blocks; b++)
                        add_values(x + j, stride, rows, value_of(words[b][0], j, &table, kind),
                                   value_of(words[b][1], j, &table, kind), sum + b * rows);
            }
        } else {
            const uint8_t *from = (const uint8_t *)values;
            for (int64_t i = 0; i < group; i++, from += COLUMNS, x++)
UNROLL
                for (int b = 0; b < blocks; b++) {
                    __builtin_prefetch(from + b * apart + AHEAD, 0, 3);
                    add_values(x, stride, rows, widen_bytes(from + b * apart, kind), widen_bytes(from + b * apart + LANES, kind),
                               sum + b * rows);
                }
        }
UNROLL
        for (int b = 0; b < blocks; b++) {
            const Head head = head_of(matrix, &place, b * of_block);
UNROLL
            for (int r = 0; r < rows; r++) {
                const int s = b * rows + r;
                apply_group(&head, matrix->offset, inputs->sums[r * groups + g], sum[s][0], sum[s][1], total[s]);
            }
        }
    }
#pragma GCC unroll 1
    for (int s = 0; s < rows * blocks; s++) finish(matrix, output, block + s / rows, row + s % rows, total[s][0], total[s][1]);
}

typedef void FewFunction(const Matrix *matrix, const Inputs *inputs, const Output *output, int64_t block, int64_t row);

#define DEFINE(NAME, KIND, ROWS, BLOCKS)                                                                               \
    static void NAME##_##KIND##_##ROWS(const Matrix *matrix, const Inputs *inputs, const Output *output,               \
                                       int64_t block, int64_t row)                                                     \
    {                                                                                                                  \
        multiply_few(matrix, inputs, output, block, row, KIND, ROWS, BLOCKS);                                          \
    }
#define DEFINE_KINDS(NAME, ROWS, BLOCKS)                                                                               \
    DEFINE(NAME, GROUPS4, ROWS, BLOCKS)                                                                                \
    DEFINE(NAME, GROUPS8, ROWS, BLOCKS)                                                                                \
    DEFINE(NAME, GROUPS_E4M3, ROWS, BLOCKS)                                                                            \
    DEFINE(NAME, GROUPS_TABLE, ROWS, BLOCKS)
#define DEFINE_FEW(ROWS) DEFINE_KINDS(few, ROWS, 1)
#define DEFINE_SEVERAL(ROWS, BLOCKS) DEFINE_KINDS(several, ROWS, BLOCKS)
EACH_FEW(DEFINE_FEW)
EACH_SEVERAL(DEFINE_SEVERAL)

#define KINDS (GROUPS_TABLE - GROUPS4 + 1)
#define OF_KINDS(NAME, ROWS) {NAME##_GROUPS4_##ROWS, NAME##_GROUPS8_##ROWS, NAME##_GROUPS_E4M3_##ROWS, NAME##_GROUPS_TABLE_##ROWS}
#define FEW_FUNCTIONS(ROWS) OF_KINDS(few, ROWS),
static FewFunction *const few_functions[][KINDS] = {EACH_FEW(FEW_FUNCTIONS)};

typedef struct {
    FewFunction *functions[KINDS];
    int64_t blocks;
} Several;

#define SEVERAL_FUNCTIONS(ROWS, BLOCKS) {OF_KINDS(several, ROWS), BLOCKS},
static const Several several[] = {EACH_SEVERAL(SEVERAL_FUNCTIONS)};
#define MOST_TOGETHER (int64_t)(sizeof several / sizeof *several) /* rows that read several blocks */

/* --- many rows: a slice of weights is widened once for all of them ------------------------------ */

/* Widen `count` inputs of a block, from input `first` of a group with these values on, to `wide` [count, COLUMNS]. */
static void widen_slice(const Matrix *matrix, const char *values, int64_t first, int64_t count, float *wide)
{
    if (!has_words(matrix->kind)) {
        const uint8_t *from = (const uint8_t *)values + first * COLUMNS;
        if (matrix->kind == GROUPS8)
            for (int64_t i = 0; i < 2 * count; i++) *(Vector *)(wide + i * LANES) = widen_bytes(from + i * LANES, GROUPS8);
        else
            for (int64_t i = 0; i < 2 * count; i++) *(Vector *)(wide + i * LANES) = widen_bytes(from + i * LANES, GROUPS_E4M3);
        return;
    }
    const Table table = table_of(matrix, matrix->kind);
    const uint32_t *words = (const uint32_t *)values + first / WORD * COLUMNS;
    for (int64_t i = 0; i < count; i += WORD, words += COLUMNS)
        for (int half = 0; half < 2; half++) {
            const Words eight = *(const Words *)(words + half * LANES);
UNROLL
            for (int j = 0; j < WORD; j++)
                *(Vector *)(wide + (i + j) * COLUMNS + half * LANES) = value_of(eight, j, &table, matrix->kind);
        }
}

/* A slice of a block, widened, and what its products are added to. */
typedef struct {
    const float *wide; /* [count, COLUMNS] */
    int64_t count, offset;
    int starts;       /* whether a group begins with it */
    const Head *head; /* that of the group that ends with it, or none */
} Slice;

/* Add its products to the group's sums [rows, COLUMNS], and those of a group that ends to the totals [rows, COLUMNS]. `inputs`
   are the sums of the group's inputs, `groups` apart. */
INLINE void add_slice(const Slice *slice, const float *x, int64_t stride, const float *inputs, int64_t groups, const int rows,
                      float *sums, float *totals)
{
    const float *wide = slice->wide;
    Vector sum[MANY][2];
UNROLL
    for (int r = 0; r < rows; r++) {
        sum[r][0] = slice->starts ? (Vector){0} : *(const Vector *)(sums + r * COLUMNS);
        sum[r][1] = slice->starts ? (Vector){0} : *(const Vector *)(sums + r * COLUMNS + LANES);
    }
    for (int64_t i = 0; i < slice->count; i++, wide += COLUMNS)
        add_values(x + i, stride, rows, *(const Vector *)wide, *(const Vector *)(wide + LANES), sum);
UNROLL
    for (int r = 0; r < rows; r++) {
        if (slice->head) {
            apply_group(slice->head, slice->offset, inputs[r * groups], sum[r][0], sum[r][1], (Vector *)(totals + r * COLUMNS));
        } else {
            *(Vector *)(sums + r * COLUMNS) = sum[r][0];
            *(Vector *)(sums + r * COLUMNS + LANES) = sum[r][1];
        }
    }
}

typedef void ManyFunction(const Slice *slice, const float *x, int64_t stride, const float *inputs, int64_t groups, float *sums,
                          float *totals);

#define DEFINE_MANY(ROWS)                                                                                              \
    static void many_##ROWS(const Slice *slice, const float *x, int64_t stride, const float *inputs, int64_t groups,   \
                            float *sums, float *totals)                                                                \
    {                                                                                                                  \
        add_slice(slice, x, stride, inputs, groups, ROWS, sums, totals);                                               \
    }
EACH_MANY(DEFINE_MANY)

#define MANY_FUNCTION(ROWS) many_##ROWS,
static ManyFunction *const many_functions[MANY] = {EACH_MANY(MANY_FUNCTION)};

static void multiply_many(const Matrix *matrix, const Inputs *inputs, const Output *output, int64_t block, int64_t row, int64_t rows)
{
    const int64_t group = matrix->group, groups = groups_of(matrix), stride = groups * group, bytes = group_bytes(matrix);
    float wide[SLICE * COLUMNS], sums[rows * COLUMNS], totals[rows * COLUMNS];
    char unpacked[MOST_UNPACKED] __attribute__((aligned(LINE)));
    Place place = place_of(matrix, block, 0);
    memset(totals, 0, sizeof totals);
    for (int64_t g = 0; g < groups; g++, move_to_next(matrix, bytes, &place)) {
        const char *values = place.group + head_bytes(matrix);
        const Head head = head_of(matrix, &place, 0);
        if (matrix->planes) pilotfish_unpack_planes(matrix, values, unpacked), values = unpacked;
        for (int64_t first = 0; first < group; first += SLICE) {
            const int64_t count = group - first < SLICE ? group - first : SLICE;
            const Slice slice = {wide, count, matrix->offset, first == 0, first + count == group ? &head : NULL};
            const float *x = inputs->values + g * group + first;
            widen_slice(matrix, values, first, count, wide);
            for (int64_t r = 0; r < rows; r += MANY) {
                const int64_t some = rows - r < MANY ? rows - r : MANY;
                many_functions[some - 1](&slice, x + r * stride, stride, inputs->sums + r * groups + g, groups,
                                         sums + r * COLUMNS, totals + r * COLUMNS);
            }
        }
    }
    pilotfish_finish(matrix, output, block, row, totals, rows);
}

/* --- a thread's share --------------------------------------------------------------------------- */

/* Each thread prepares the rows of a chunk for itself. */
void pilotfish_multiply_groups(const Matrix *matrix, const float *input, const Output *output, int64_t rows, int64_t team)
{
    const int64_t groups = groups_of(matrix), width = groups * matrix->group, row_bytes = width * (int64_t)sizeof(float);
    const int64_t fitting = CHUNK / row_bytes, bounded = fitting < MOST_ROWS ? fitting : MOST_ROWS, most = bounded > FEW ? bounded : FEW;
    const int64_t chunks = (rows + most - 1) / most, size = (rows + chunks - 1) / chunks;
    const int64_t items = chunks * matrix->blocks, thread = omp_get_thread_num(), end = items * (thread + 1) / team;
    const int64_t kind = matrix->kind - GROUPS4;
    float values[size * width], sums[size * groups];
    const Inputs inputs = {values, sums};
    for (int64_t item = items * thread / team, known = -1, blocks = 1; item < end; item += blocks) {
        const int64_t chunk = item / matrix->blocks, block = item % matrix->blocks;
        const int64_t row = rows * chunk / chunks, some = rows * (chunk + 1) / chunks - row;
        if (chunk != known) prepare(matrix, input + row * matrix->inputs, some, values, sums);
        known = chunk, blocks = 1;
        if (some > FEWER * FEW) {
            multiply_many(matrix, &inputs, output, block, row, some);
            continue;
        }
        if (some > FEW) {
            for (int64_t r = 0, size = (some + FEWER - 1) / FEWER; r < some; r += size) {
                const Inputs part = {values + r * width, sums + r * groups};
                few_functions[(some - r < size ? some - r : size) - 1][kind](matrix, &part, output, block, row + r);
            }
            continue;
        }
        const int64_t left = end - item < matrix->blocks - block ? end - item : matrix->blocks - block;
        const Several *together = some <= MOST_TOGETHER && several[some - 1].blocks <= left ? several + some - 1 : NULL;
        if (together) blocks = together->blocks;
        (together ? together->functions : few_functions[some - 1])[kind](matrix, &inputs, output, block, row);
    }
}

/* --- a row of a packed matrix, unpacked ---------------------------------------------------------- */

/* A scale of a group, or what it has beside it. */
static float number_of(const Matrix *matrix, const Place *place, int64_t column, int is_offset)
{
    const int64_t at = is_offset * COLUMNS + column;
    if (!matrix->super) return number(place->group, matrix->scale_kind, at);
    const uint8_t byte = (uint8_t)place->group[matrix->scale_kind == SUPER_NIBBLES ? column : at];
    const float size = (float)(matrix->scale_kind == SUPER_BYTES ? (int8_t)byte : byte >> 4 * is_offset & 0xf);
    return widen_float16(((const uint16_t *)place->units)[at]) * (is_offset ? -size : size);
}

/* A value of a group by the number of its input, without scale and zero. */
static float value_at(const Matrix *matrix, const char *values, int64_t at, int64_t column)
{
    int64_t index = at * COLUMNS + column; /* of its byte */
    if (has_words(matrix->kind)) {
        index = (at / WORD * COLUMNS + column) * (WORD / 2) + at % WORD / 2;
    } else if (matrix->kind == GROUPS8_TILES) {
        const int64_t ordered = at / WORD * WORD + at % 2 * (WORD / 2) + at % WORD / 2;
        index = (ordered / 4 * COLUMNS + column) * 4 + ordered % 4;
    }
    const uint8_t byte = matrix->planes ? pilotfish_unpacked_byte(matrix, values, index) : (uint8_t)values[index];
    if (matrix->kind == GROUPS_E4M3) return 256.0f * widen_e4m3(byte);
    if (!has_words(matrix->kind)) return (float)(int8_t)byte;
    const int half = byte >> at % 2 * 4 & 0xf;
    return matrix->kind == GROUPS_TABLE ? matrix->table[half] : (float)half;
}

void pilotfish_row_of_groups(const Matrix *matrix, int64_t id, float *to)
{
    const int64_t column = id % COLUMNS, group = matrix->group, bytes = group_bytes(matrix);
    Place place = place_of(matrix, id / COLUMNS, 0);
    for (int64_t first = 0; first < matrix->inputs; first += group, move_to_next(matrix, bytes, &place)) {
        const char *values = place.group + head_bytes(matrix);
        const int64_t left = matrix->inputs - first, count = left < group ? left : group;
        const float scale = number_of(matrix, &place, column, 0);
        volatile float rounded = matrix->offset == NO_OFFSET ? matrix->zero : number_of(matrix, &place, column, 1);
        const float offset = rounded; /* by itself, as the reference does, and so is the product */
        for (int64_t i = 0; i < count; i++) {
            const float value = value_at(matrix, values, i, column);
            float *own = to + (matrix->order ? matrix->order[first + i] : first + i);
            if (matrix->offset == MINIMUM) {
                volatile float product = scale * value;
                *own = product + offset;
            } else {
                *own = scale * (value - offset);
            }
        }
    }
}
