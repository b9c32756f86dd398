/* Attention on tile registers, for pools of bfloat16 numbers. See attention.c for what it computes.

   Positions are taken in steps of STEP. A step's keys are packed in pairs, so that a tile register multiplies 16 queries
   with 16 keys; the weights of the step's positions are computed on vectors and rounded to bfloat16; and its values are
   packed in pairs of positions and multiplied with the weights. The sums of the steps before are rescaled and the step's
   sum is added (online softmax). Queries are rounded to bfloat16, as `transformers` rounds them in this type; scores,
   largest scores, totals and sums are in single precision.

   A query's sums run over its own positions in order, in steps and tiles that begin at fixed positions. Positions that it
   does not see add zero. A row of a tile does not depend on its other rows. So no bit of the result depends on the batch,
   the number of threads, or the position of a token inside a tree. */

#include "positions.h"
#include "registers.h"

#define STEP 64              /* positions between two changes of a query's largest score */
#define PARTS (STEP / KEYS)  /* parts of a step: what a tile register multiplies of its weights */
#define LOG2_E 1.44269504f

int pilotfish_attends_on_tiles(const Layer *layer, int64_t kind)
{
    return pilotfish_has_tiles() && kind == BFLOAT16 && layer->dim % INPUTS == 0 && layer->dim <= MOST_DIM;
}

#if HAS_TILES || defined(EMULATE_TILES)

typedef struct {
    ALIGNED uint16_t query[MOST_ON_TILES * MOST_DIM];  /* [vectors, dim] */
    ALIGNED float sum[MOST_ON_TILES * MOST_DIM];       /* [vectors, dim] weighted sums of the values so far */
    ALIGNED Vector total[MOST_ON_TILES];               /* sums of the weights, by lane */
    float most[MOST_ON_TILES + TILE_ROWS];             /* largest scores */
    uint32_t seen[MOST_ON_TILES][PARTS];               /* the step's positions that each token sees, as bits */
    ALIGNED float keys[PARTS][MOST_DIM / 2 * KEYS];    /* pairs of a key's numbers, [dim / 2, KEYS] */
    ALIGNED uint32_t values[PARTS][KEYS / 2 * MOST_DIM]; /* pairs of positions, [KEYS / 2, dim] */
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

/* --- keys and values ------------------------------------------------------------------------- */

static const uint16_t nothing[MOST_DIM];

/* Pack one head's keys and values of a part of a step; zeros for slots below 0. */
static void pack(Work *work, const Layer *layer, int64_t head, const int64_t *slots, int part)
{
    const int64_t dim = layer->dim;
    const uint16_t *key[KEYS], *value[KEYS];
    for (int k = 0; k < KEYS; k++) {
        const int64_t at = (slots[k] * layer->kv_heads + head) * dim;
        key[k] = slots[k] < 0 ? nothing : (const uint16_t *)layer->keys + at;
        value[k] = slots[k] < 0 ? nothing : (const uint16_t *)layer->values + at;
        for (int64_t d = 0; d < dim; d += LINE / (int64_t)sizeof **value) __builtin_prefetch(value[k] + d, 0, 3);
    }
    for (int64_t d = 0; d < dim; d += 2 * LANES)
        for (int half = 0; half < KEYS; half += LANES) transpose_pairs(key + half, d, work->keys[part] + d / 2 * KEYS + half);
    uint32_t *to = work->values[part];
    for (int k = 0; k < KEYS; k += 2)
        for (int64_t d = 0; d < dim; d += LANES, to += LANES) {
            const Words low = __builtin_convertvector(*(const Halves *)(value[k] + d), Words);
            const Words high = __builtin_convertvector(*(const Halves *)(value[k + 1] + d), Words);
            *(Words *)to = low | high << 16;
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
   `vectors`, whose states begin at v. */
INLINE void attend_group(Emulated *emulated, Work *work, const Layer *layer, int64_t v, int64_t from, int rows)
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
    configure(emulated, rows, rows);
    score(emulated, work, work->query + v * dim, dim, parts);
    weigh(work, seen, v, rows, parts, layer->scale, factor);
    add_values(emulated, work, dim, parts);
    for (int r = 0; r < rows; r++) {
        float *sum = work->sum + (v + r) * dim;
        for (int64_t d = 0; d < dim; d += LANES)
            *(Vector *)(sum + d) = *(const Vector *)(sum + d) * factor[r] + *(const Vector *)(work->fresh + r * dim + d);
    }
}

/* --- an item --------------------------------------------------------------------------------- */

INLINE void attend(Emulated *emulated, const Step *step, const Layer *layer, int64_t row, int64_t head, int64_t heads,
                   int64_t token, int64_t count)
{
    const int64_t dim = layer->dim, shared = layer->heads / layer->kv_heads, vectors = count * shared;
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
        for (int part = 0; part < common; part++) locate(step, layer, row, token, first + part * KEYS, any[part], slots[part]);
        prefetch_positions(step, layer, row, first ? first + STEP : 0, first + 2 * STEP, sizeof(uint16_t));
        for (int64_t h = 0; h < heads; h++) {
            for (int part = 0; part < common; part++) pack(&work, layer, head + h, slots[part], part);
            const int64_t each = common < parts ? shared : vectors; /* vectors with the same keys */
            for (int64_t own = 0; own < vectors; own += each) {
                for (int part = common; part < parts; part++) {
                    const int64_t of = own / shared;
                    locate(step, layer, row, token + of, first + part * KEYS, work.seen[of][part], slots[part]);
                    pack(&work, layer, head + h, slots[part], part);
                }
                for (int64_t from = own; from < own + each; from += TILE_ROWS) {
                    const int64_t left = own + each - from;
                    attend_group(emulated, &work, layer, h * vectors + from, from, left < TILE_ROWS ? (int)left : TILE_ROWS);
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
