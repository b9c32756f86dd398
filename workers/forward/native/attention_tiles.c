/* Attention on tile registers, for pools of bfloat16 numbers. See attention.c for what it computes.

   Positions are taken in steps of STEP. A step's keys are packed in pairs, so that a tile register multiplies 16 queries
   with 16 keys. For few queries, these are packed instead, once, and keys are read as they lie in the pool. The weights of
   the step's positions are computed on vectors and rounded to bfloat16; and its values are packed in pairs of positions and
   multiplied with the weights. The sums of the steps before are rescaled and the step's sum is added (online softmax).
   Queries are rounded to bfloat16, as `transformers` rounds them in this type; scores, largest scores, totals and sums are
   in single precision.

   A query's sums run over its own positions in order, in steps and tiles that begin at fixed positions. Positions that it
   does not see add zero. A row of a tile does not depend on its other rows. So no bit of the result depends on the batch,
   the number of threads, or the position of a token inside a tree. */

#include "positions.h"
#include "registers.h"

#define STEP 64              /* positions between two changes of a query's largest score */
#define PARTS (STEP / KEYS)  /* parts of a step: what a tile register multiplies of its weights */
#define LOG2_E 1.44269504f
#define FEW_HEADS 8          /* most KV heads of an item of few queries */
#define FEW (2 * HALF)       /* most query vectors of a KV head of such an item */
#define PAIRED (FEW + HALF)  /* columns of their pairs: a tile may begin at the last one */

int pilotfish_attends_on_tiles(const Layer *layer, int64_t kind)
{
    return pilotfish_has_tiles() && kind == BFLOAT16 && !layer->latent && !layer->slopes && layer->dim % INPUTS == 0 &&
           layer->dim <= MOST_DIM;
}

#if HAS_TILES || defined(EMULATE_TILES)

typedef struct {
    ALIGNED uint16_t query[MOST_ON_TILES * MOST_DIM];  /* [vectors, dim] */
    ALIGNED uint32_t pairs[FEW_HEADS][MOST_DIM / 2 * PAIRED]; /* pairs of a head's few queries, [dim / 2, PAIRED] */
    ALIGNED float sum[MOST_ON_TILES * MOST_DIM];       /* [vectors, dim] weighted sums of the values so far */
    ALIGNED Vector total[MOST_ON_TILES];               /* sums of the weights, by lane */
    float most[MOST_ON_TILES + TILE_ROWS];             /* largest scores */
    uint32_t seen[MOST_ON_TILES][PARTS];               /* the step's positions that each token sees, as bits */
    ALIGNED float keys[PARTS][MOST_DIM / 2 * KEYS];    /* pairs of a key's numbers, [dim / 2, KEYS] */
    ALIGNED uint32_t values[PARTS][KEYS / 2 * MOST_DIM]; /* pairs of positions, [KEYS / 2, dim] */
    ALIGNED uint16_t rows[TILE_ROWS * MOST_DIM];       /* keys that do not follow each other in the pool, [keys, dim] */
    ALIGNED float columns[STEP * HALF];                /* scores by position, [STEP, HALF] */
    ALIGNED float scores[TILE_ROWS * STEP];
    ALIGNED uint16_t weights[TILE_ROWS * STEP];
    ALIGNED float fresh[TILE_ROWS * MOST_DIM];         /* the step's weighted sums, [rows, dim] */
} Work;

/* --- vectors --------------------------------------------------------------------------------- */

/* 2^x for x <= 0, with a relative error below 8e-5, a twentieth of what rounding to bfloat16 adds. */
INLINE Vector power_of_two(Vector x)
{
    const float c[] = {0.99992522f, 0.69583354f, 0.22606716f, 0.07802452f};
#if defined(IS_AVX512)
    const __m512 part = _mm512_reduce_ps((__m512)x, 1); /* x - floor(x) */
    __m512 p = _mm512_fmadd_ps(part, _mm512_set1_ps(c[3]), _mm512_set1_ps(c[2]));
    p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(c[1]));
    p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(c[0]));
    return (Vector)_mm512_scalef_ps(p, (__m512)x); /* p * 2^floor(x) */
#else
    Vector power;
    for (int l = 0; l < LANES; l++) {
        const float whole = floorf(x[l]), part = x[l] - whole;
        power[l] = x[l] < -200.0f ? 0.0f : ldexpf(fmaf(fmaf(fmaf(part, c[3], c[2]), part, c[1]), part, c[0]), (int)whole);
    }
    return power;
#endif
}

/* The lanes of x whose bits are set; `otherwise` in the other lanes. */
INLINE Vector only(Vector x, uint32_t bits, float otherwise)
{
#if defined(IS_AVX512)
    return (Vector)_mm512_mask_mov_ps(_mm512_set1_ps(otherwise), (__mmask16)bits, (__m512)x);
#else
    for (int l = 0; l < LANES; l++) x[l] = (bits >> l) & 1 ? x[l] : otherwise;
    return x;
#endif
}

INLINE Vector larger(Vector one, Vector other)
{
#if defined(IS_AVX512)
    return (Vector)_mm512_max_ps((__m512)one, (__m512)other);
#else
    for (int l = 0; l < LANES; l++) one[l] = one[l] > other[l] ? one[l] : other[l];
    return one;
#endif
}

INLINE float largest_lane(Vector x)
{
#if defined(IS_AVX512)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int l = 1; l < LANES; l++) most = x[l] > most ? x[l] : most;
    return most;
#endif
}

INLINE void put_weights(uint16_t *to, Vector first, Vector second)
{
#if defined(IS_AVX512) && defined(__AVX512BF16__)
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
    *(Halves *)to = narrow_bfloat16s(first);
    *(Halves *)(to + LANES) = narrow_bfloat16s(second);
#endif
}

/* The first `rows` columns of [TILE_ROWS, HALF] as rows of a step's scores. */
INLINE void transpose_columns(const float *from, int rows, float *to)
{
#if defined(IS_AVX512)
    if (rows <= 4) {
        __m512 four[4]; /* four numbers each of the positions i, 4 + i, 8 + i, 12 + i */
        for (int i = 0; i < 4; i++) {
            four[i] = _mm512_castps128_ps512(_mm_load_ps(from + i * HALF));
            four[i] = _mm512_mask_broadcast_f32x4(four[i], 0x00f0, _mm_load_ps(from + (4 + i) * HALF));
            four[i] = _mm512_mask_broadcast_f32x4(four[i], 0x0f00, _mm_load_ps(from + (8 + i) * HALF));
            four[i] = _mm512_mask_broadcast_f32x4(four[i], 0xf000, _mm_load_ps(from + (12 + i) * HALF));
        }
        const __m512 a = _mm512_unpacklo_ps(four[0], four[1]), b = _mm512_unpacklo_ps(four[2], four[3]);
        const __m512 c = _mm512_unpackhi_ps(four[0], four[1]), d = _mm512_unpackhi_ps(four[2], four[3]);
        _mm512_store_ps(to, _mm512_shuffle_ps(a, b, 0x44));
        if (rows > 1) _mm512_store_ps(to + STEP, _mm512_shuffle_ps(a, b, 0xee));
        if (rows > 2) _mm512_store_ps(to + 2 * STEP, _mm512_shuffle_ps(c, d, 0x44));
        if (rows > 3) _mm512_store_ps(to + 3 * STEP, _mm512_shuffle_ps(c, d, 0xee));
        return;
    }
    Vector lines[TILE_ROWS];
    for (int k = 0; k < TILE_ROWS; k++) lines[k] = *(const Vector *)(from + k * HALF);
    transpose(lines, STEP, to);
#else
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < TILE_ROWS; k++) to[r * STEP + k] = from[k * HALF + r];
#endif
}

/* --- keys and values ------------------------------------------------------------------------- */

static const uint16_t nothing[MOST_DIM];

/* One head's numbers of a slot; zeros for a slot below 0. */
INLINE const uint16_t *numbers_of(const Layer *layer, const void *numbers, int64_t head, int64_t slot)
{
    return slot < 0 ? nothing : (const uint16_t *)numbers + (slot * layer->kv_heads + head) * layer->dim;
}

/* A row's committed positions up to `last` among first … first + KEYS - 1, as bits. */
INLINE uint32_t committed(const Step *step, int64_t row, int64_t first, int64_t last)
{
    const int64_t count = (step->base_len[row] <= last ? step->base_len[row] : last + 1) - first;
    return count <= 0 ? 0 : count < KEYS ? (1u << count) - 1 : ALL;
}

/* Positions whose keys and values are prefetched to the second-level cache beside other work: all at once they would wait
   for each other, because few lines can be on their way at a time. */
typedef struct {
    int64_t slots[STEP];
    int64_t head, heads; /* the KV heads */
    int64_t first, done; /* the first position, and how many of them are prefetched */
} Ahead;

/* Prefetch until `end` of the positions are. */
INLINE void prefetch_ahead(const Layer *layer, Ahead *ahead, int64_t end)
{
    const int64_t bytes = ahead->heads * layer->dim * (int64_t)sizeof(uint16_t);
    for (; ahead->done < end; ahead->done++) {
        if (ahead->slots[ahead->done] < 0) continue;
        const char *keys = (const char *)numbers_of(layer, layer->keys, ahead->head, ahead->slots[ahead->done]);
        const char *values = (const char *)numbers_of(layer, layer->values, ahead->head, ahead->slots[ahead->done]);
        for (int64_t byte = 0; byte < bytes; byte += LINE) {
            __builtin_prefetch(keys + byte, 0, 2);
            __builtin_prefetch(values + byte, 0, 2);
        }
    }
}

/* Pack one head's keys of a part of a step; zeros for slots below 0. */
static void pack_keys(Work *work, const Layer *layer, int64_t head, const int64_t *slots, int part)
{
    const int64_t dim = layer->dim;
    const uint16_t *key[KEYS];
    for (int k = 0; k < KEYS; k++) key[k] = numbers_of(layer, layer->keys, head, slots[k]);
    for (int64_t d = 0; d < dim; d += 2 * LANES)
        for (int half = 0; half < KEYS; half += LANES) transpose_pairs(key + half, d, work->keys[part] + d / 2 * KEYS + half);
}

/* The same for values. Beside it, positions are prefetched up to `end`. */
static void pack_values(Work *work, const Layer *layer, int64_t head, const int64_t *slots, Ahead *ahead, int64_t end, int part)
{
    const int64_t dim = layer->dim, begin = ahead->done;
    uint32_t *to = work->values[part];
    for (int k = 0; k < KEYS; k += 2) {
        const uint16_t *one = numbers_of(layer, layer->values, head, slots[k]);
        const uint16_t *other = numbers_of(layer, layer->values, head, slots[k + 1]);
        for (int64_t d = 0; d < dim; d += LANES, to += LANES) {
            const Words low = __builtin_convertvector(*(const Halves *)(one + d), Words);
            const Words high = __builtin_convertvector(*(const Halves *)(other + d), Words);
            *(Words *)to = low | high << 16;
        }
        prefetch_ahead(layer, ahead, begin + (end - begin) * (k + 2) / KEYS);
    }
}

/* --- a group of queries ---------------------------------------------------------------------- */

/* Scores of a group's rows from `query` on with the first `parts` parts of the step. */
INLINE void score(Emulated *emulated, Work *work, const uint16_t *query, int64_t dim, int parts)
{
    const int64_t stride = KEYS * (int64_t)sizeof(float), row = dim * (int64_t)sizeof *query;
    for (int part = 0; part < parts; part += 2) {
        const char *keys = (const char *)work->keys[part], *next = (const char *)work->keys[part + 1 < parts ? part + 1 : part];
        CLEAR(SUMS);
        CLEAR(SUMS + 1);
        CLEAR(SUMS + 2);
        CLEAR(SUMS + 3);
        for (int64_t d = 0; d < dim; d += INPUTS, keys += TILE_ROWS * stride, next += TILE_ROWS * stride) {
            LOAD(ROWS_OF_INPUTS, query + d, row);
            LOAD(WEIGHTS, keys, stride);
            MULTIPLY(SUMS, ROWS_OF_INPUTS, WEIGHTS);
            LOAD(WEIGHTS + 1, keys + TILE_BYTES, stride);
            MULTIPLY(SUMS + 1, ROWS_OF_INPUTS, WEIGHTS + 1);
            if (part + 1 == parts) continue;
            LOAD(WEIGHTS, next, stride);
            MULTIPLY(SUMS + 2, ROWS_OF_INPUTS, WEIGHTS);
            LOAD(WEIGHTS + 1, next + TILE_BYTES, stride);
            MULTIPLY(SUMS + 3, ROWS_OF_INPUTS, WEIGHTS + 1);
        }
        char *to = (char *)(work->scores + part * KEYS);
        const int64_t step = STEP * sizeof(float);
        SAVE(SUMS, to, step);
        SAVE(SUMS + 1, to + TILE_BYTES, step);
        if (part + 1 == parts) continue;
        SAVE(SUMS + 2, to + 2 * TILE_BYTES, step);
        SAVE(SUMS + 3, to + 3 * TILE_BYTES, step);
    }
}

/* The keys of TILE_ROWS slots as they lie in the pool, or copies of them. */
INLINE const char *key_rows(Work *work, const Layer *layer, int64_t head, const int64_t *slots, int64_t *stride)
{
    int follow = slots[0] >= 0;
    for (int k = 1; k < TILE_ROWS; k++) follow &= slots[k] == slots[0] + k;
    *stride = layer->kv_heads * layer->dim * (int64_t)sizeof(uint16_t);
    if (follow) return (const char *)numbers_of(layer, layer->keys, head, slots[0]);
    *stride = layer->dim * (int64_t)sizeof(uint16_t);
    for (int k = 0; k < TILE_ROWS; k++) memcpy(work->rows + k * layer->dim, numbers_of(layer, layer->keys, head, slots[k]), (size_t)*stride);
    return (const char *)work->rows;
}

/* The scores of the keys of TILE_ROWS slots, from SLOTS on: the step's positions from FIRST * TILE_ROWS on. */
#define SCORE_PART(FIRST, SLOTS)                                                                                       \
    do {                                                                                                               \
        int64_t stride;                                                                                                \
        const char *keys = key_rows(work, layer, head, SLOTS, &stride);                                                \
        CLEAR(SUMS + FIRST);                                                                                           \
        for (int64_t d = 0; d < layer->dim; d += INPUTS) {                                                             \
            LOAD(ROWS_OF_INPUTS, keys + d * (int64_t)sizeof(uint16_t), stride);                                        \
            LOAD(WEIGHTS, pairs + d / 2 * PAIRED, PAIRED * (int64_t)sizeof(uint32_t));                                 \
            MULTIPLY(SUMS + FIRST, ROWS_OF_INPUTS, WEIGHTS);                                                           \
        }                                                                                                              \
        SAVE(SUMS + FIRST, work->columns + FIRST * TILE_ROWS * HALF, TILE_BYTES);                                      \
    } while (0)

/* The same scores for few rows, those of `pairs` [dim / 2, PAIRED]: keys are the rows of the tiles, as they lie in the pool,
   and are not packed. The order of a score's sum is that of `score`. */
INLINE void score_few(Emulated *emulated, Work *work, const Layer *layer, int64_t head, const uint32_t *pairs, int rows,
                      int64_t (*slots)[KEYS], int parts)
{
    SCORE_PART(0, slots[0]);
    SCORE_PART(1, slots[0] + TILE_ROWS);
    if (parts > 1) SCORE_PART(2, slots[1]);
    if (parts > 1) SCORE_PART(3, slots[1] + TILE_ROWS);
    for (int first = 0; first < parts * KEYS; first += TILE_ROWS)
        transpose_columns(work->columns + first * HALF, rows, work->scores + first);
}

/* Weighted sums of the values of the first `parts` parts of the step, into `work->fresh`. */
INLINE void add_values(Emulated *emulated, Work *work, int64_t dim, int parts)
{
    const int64_t row = STEP * sizeof *work->weights, stride = dim * (int64_t)sizeof(uint32_t);
    for (int64_t d = 0; d < dim; d += 2 * INPUTS) {
        const int is_wide = d + INPUTS < dim;
        CLEAR(SUMS);
        CLEAR(SUMS + 1);
        CLEAR(SUMS + 2);
        CLEAR(SUMS + 3);
        for (int part = 0; part < parts; part++) {
            const char *values = (const char *)(work->values[part] + d);
            LOAD(ROWS_OF_INPUTS, work->weights + part * KEYS, row);
            LOAD(WEIGHTS, values, stride);
            MULTIPLY(SUMS, ROWS_OF_INPUTS, WEIGHTS);
            LOAD(WEIGHTS + 1, values + TILE_BYTES, stride);
            MULTIPLY(SUMS + 1, ROWS_OF_INPUTS, WEIGHTS + 1);
            if (!is_wide) continue;
            LOAD(WEIGHTS, values + 2 * TILE_BYTES, stride);
            MULTIPLY(SUMS + 2, ROWS_OF_INPUTS, WEIGHTS);
            LOAD(WEIGHTS + 1, values + 3 * TILE_BYTES, stride);
            MULTIPLY(SUMS + 3, ROWS_OF_INPUTS, WEIGHTS + 1);
        }
        char *to = (char *)(work->fresh + d);
        SAVE(SUMS, to, stride);
        SAVE(SUMS + 1, to + TILE_BYTES, stride);
        if (!is_wide) continue;
        SAVE(SUMS + 2, to + 2 * TILE_BYTES, stride);
        SAVE(SUMS + 3, to + 3 * TILE_BYTES, stride);
    }
}

/* The weights of `rows` rows, from vector v on, and the factors by which their earlier sums change. */
INLINE void weigh(Work *work, const uint32_t (*const *seen)[PARTS], int64_t v, int rows, int parts, float scale, float *factor)
{
    Vector tile, old, kept;
    for (int r = 0; r < rows; r++) {
        const float *scores = work->scores + r * STEP;
        Vector most = only((Vector){0}, 0, -INFINITY);
        for (int part = 0; part < parts; part++, scores += KEYS) {
            const uint32_t bits = (*seen[r])[part];
            most = larger(only(*(const Vector *)scores, bits, -INFINITY), most);
            most = larger(only(*(const Vector *)(scores + LANES), bits >> LANES, -INFINITY), most);
        }
        factor[r] = largest_lane(most);
    }
    memcpy(&tile, factor, sizeof tile);
    memcpy(&old, work->most + v, sizeof old);
    const Vector largest = larger(tile, old);
    kept = exponentials((old - largest) * scale);
    for (int r = 0; r < rows; r++) {
        uint32_t any = 0;
        for (int part = 0; part < parts; part++) any |= (*seen[r])[part];
        factor[r] = any ? kept[r] : 1.0f; /* a row that sees nothing here stays as it is */
        work->most[v + r] = largest[r];
        const float slope = scale * LOG2_E, offset = any ? -(largest[r] * slope) : 0.0f;
        const float *scores = work->scores + r * STEP;
        Vector total = work->total[v + r] * factor[r];
        for (int part = 0; part < parts; part++) {
            const uint32_t bits = (*seen[r])[part];
            const Vector first = only(power_of_two(*(const Vector *)(scores + part * KEYS) * slope + offset), bits, 0.0f);
            const Vector second = only(power_of_two(*(const Vector *)(scores + part * KEYS + LANES) * slope + offset), bits >> LANES, 0.0f);
            total += first;
            total += second;
            put_weights(work->weights + r * STEP + part * KEYS, first, second);
        }
        work->total[v + r] = total;
    }
}

/* Add the step to the softmax of at most TILE_ROWS query vectors of one KV head: those from `from` on of the head's
   `vectors`, whose states begin at v. With `pairs` of these rows, the keys of `slots` are read as they are, else packed. */
INLINE void attend_group(Emulated *emulated, Work *work, const Layer *layer, int64_t head, int64_t v, int64_t from, int rows,
                         int64_t (*slots)[KEYS], const uint32_t *pairs)
{
    const int64_t dim = layer->dim, shared = layer->heads / layer->kv_heads;
    const uint32_t(*seen[TILE_ROWS])[PARTS];
    ALIGNED float factor[TILE_ROWS] = {0};
    int parts = 0;
    for (int r = 0; r < rows; r++) {
        seen[r] = (const uint32_t(*)[PARTS])work->seen[(from + r) / shared];
        for (int part = parts; part < PARTS; part++) parts = (*seen[r])[part] ? part + 1 : parts;
    }
    if (!parts) return;
    if (pairs) {
        configure(emulated, TILE_ROWS, TILE_ROWS, TILE_BYTES);
        score_few(emulated, work, layer, head, pairs, rows, slots, parts);
    } else {
        configure(emulated, rows, rows, TILE_BYTES);
        score(emulated, work, work->query + v * dim, dim, parts);
    }
    weigh(work, seen, v, rows, parts, layer->scale, factor);
    add_values(emulated, work, dim, parts);
    for (int r = 0; r < rows; r++) {
        float *sum = work->sum + (v + r) * dim;
        for (int64_t d = 0; d < dim; d += LANES)
            *(Vector *)(sum + d) = *(const Vector *)(sum + d) * factor[r] + *(const Vector *)(work->fresh + r * dim + d);
    }
}

/* Pairs of the numbers of a head's query vectors: at most FEW. */
INLINE void pair_queries(Work *work, int64_t head, int64_t vectors, int64_t dim)
{
    for (int64_t v = 0; v < vectors; v++)
        for (int64_t pair = 0; pair < dim / 2; pair++)
            memcpy(work->pairs[head] + pair * PAIRED + v, work->query + (head * vectors + v) * dim + 2 * pair, sizeof(uint32_t));
}

/* --- an item --------------------------------------------------------------------------------- */

INLINE void attend(Emulated *emulated, const Step *step, const Layer *layer, int64_t row, int64_t head, int64_t heads,
                   int64_t token, int64_t count)
{
    const int64_t dim = layer->dim, shared = layer->heads / layer->kv_heads, vectors = count * shared;
    const int is_few = vectors <= FEW && heads <= FEW_HEADS;
    Work work;
    int64_t least = INT64_MAX, last = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t own = step->position[token + i];
        least = own < least ? own : least;
        last = own > last ? own : last;
    }
    for (int64_t v = 0; v < heads * vectors; v++) { /* head by head, token by token */
        const int64_t of = (head + v / vectors) * shared + v % shared, at = token + v % vectors / shared;
        const int64_t from = of * layer->query_head + at * layer->query_token;
        if (layer->query_kind == BFLOAT16) memcpy(work.query + v * dim, (const uint16_t *)layer->query + from, (size_t)dim * sizeof *work.query);
        else put(work.query, BFLOAT16, v * dim, (const float *)layer->query + from, dim);
        memset(work.sum + v * dim, 0, (size_t)dim * sizeof *work.sum);
        work.total[v] = (Vector){0};
        work.most[v] = -INFINITY;
    }
    Ahead ahead = {.head = head, .heads = heads, .first = -1};
    for (int64_t h = 0; is_few && h < heads; h++) pair_queries(&work, h, vectors, dim);
    const int64_t nearest = layer->window ? least - layer->window + 1 : 0; /* the first position that some window reaches */
    for (int64_t first = 0; first <= last; first += STEP) {
        if (first + STEP <= nearest && first >= layer->sinks) { /* go on with the step that the first window reaches */
            first = nearest / STEP * STEP - STEP;
            continue;
        }
        const int parts = last + 1 - first < STEP ? (int)((last - first) / KEYS) + 1 : PARTS;
        const int all_seen = !layer->window && first + STEP <= least + 1;
        uint32_t any[PARTS] = {0};
        for (int64_t i = 0; i < count; i++)
            for (int part = 0; part < PARTS; part++)
                any[part] |= work.seen[i][part] = all_seen ? ALL : visible(step, layer, token + i, first + part * KEYS);
        int common = 0; /* parts whose keys all queries share */
        while (common < parts && first + (common + 1) * KEYS <= step->base_len[row]) common++;
        int64_t slots[PARTS][KEYS];
        /* What the step before has prefetched is what this one reads. Some of it is not seen: its weights are zero. */
        memcpy(slots, ahead.slots, sizeof slots);
        for (int part = 0; part < PARTS; part++) {
            const int64_t from = first + part * KEYS, next = from + STEP;
            if (part < common && ahead.first != first) locate(step, layer, row, token, from, any[part], slots[part]);
            locate(step, layer, row, token, next, committed(step, row, next, last), ahead.slots + part * KEYS);
        }
        ahead.first = first + STEP, ahead.done = 0;
        for (int64_t h = 0; h < heads; h++) {
            for (int part = 0; part < common; part++) {
                const int64_t end = STEP * (h * common + part + 1) / (heads * common);
                pack_values(&work, layer, head + h, slots[part], &ahead, end, part);
                if (!is_few) pack_keys(&work, layer, head + h, slots[part], part);
            }
            const int64_t each = common < parts ? shared : vectors; /* vectors with the same keys */
            for (int64_t own = 0; own < vectors; own += each) {
                for (int part = common; part < parts; part++) {
                    const int64_t of = own / shared;
                    locate(step, layer, row, token + of, first + part * KEYS, work.seen[of][part], slots[part]);
                    pack_values(&work, layer, head + h, slots[part], &ahead, ahead.done, part);
                    if (!is_few) pack_keys(&work, layer, head + h, slots[part], part);
                }
                for (int64_t from = own; from < own + each; from += TILE_ROWS) {
                    const int64_t left = own + each - from;
                    const int rows = left < TILE_ROWS ? (int)left : TILE_ROWS;
                    const uint32_t *pairs = is_few ? work.pairs[h] + from : NULL;
                    attend_group(emulated, &work, layer, head + h, h * vectors + from, from, rows, slots, pairs);
                }
            }
        }
    }
    for (int64_t v = 0; v < heads * vectors; v++) {
        const int64_t of = (head + v / vectors) * shared + v % shared, at = token + v % vectors / shared;
        const float share = 1.0f / sum_of_lanes(work.total[v]);
        for (int64_t d = 0; d < dim; d++) work.sum[v * dim + d] *= share;
        put(layer->output, layer->output_kind, (at * layer->heads + of) * dim, work.sum + v * dim, dim);
    }
}

void pilotfish_attend_on_tiles(const Step *step, const Layer *layer, int64_t row, int64_t head, int64_t heads, int64_t token,
                               int64_t count)
{
#ifdef EMULATE_TILES
    Emulated tiles;
    attend(&tiles, step, layer, row, head, heads, token, count);
#else
    attend(NULL, step, layer, row, head, heads, token, count);
    pilotfish_leave_tiles();
#endif
}

#else

void pilotfish_attend_on_tiles(const Step *step, const Layer *layer, int64_t row, int64_t head, int64_t heads, int64_t token,
                               int64_t count)
{
    (void)step, (void)layer, (void)row, (void)head, (void)heads, (void)token, (void)count; /* never called */
}

#endif
