/* Attention over the slots of a drafting module's window, in tiles of slots (Dao et al. 2022).

   The keys of a tile are transposed once for all queries, so that a vector holds the scores of one query for neighbouring
   slots. Tiles begin at the first slot, and each query is computed by itself: the result does not depend on what else is
   in a pass. */

#include "windows.h"

/* Slots of a tile, and how many vectors of how many queries stay in registers. */
enum { TILE = 64, WIDE = 4, MOST_QUERIES = REGISTERS / 8 };

/* The slots of a tile that a token sees. */
typedef struct {
    int64_t count;
    int64_t slot[TILE];  /* [count], from the tile's first one on */
    uint32_t mask[TILE]; /* all bits of a slot that is seen */
} Seen;

static inline Vector larger(Vector a, Vector b)
{
#if defined(IS_AVX512)
    return (Vector)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(IS_AVX2)
    return (Vector)_mm256_max_ps((__m256)a, (__m256)b);
#else
    for (int l = 0; l < LANES; l++) a[l] = a[l] > b[l] ? a[l] : b[l];
    return a;
#endif
}

#if defined(IS_AVX512)
#define HAS_SQUARES 1

/* LANES vectors that are `dim` numbers apart → as many that are TILE numbers apart. First squares of four numbers are
   transposed in all quarters of the vectors, then squares of four quarters. */
INLINE void transpose_square(const float *from, int64_t dim, float *to)
{
    __m512 row[LANES], part[LANES];
    for (int i = 0; i < LANES; i++) row[i] = _mm512_loadu_ps(from + i * dim);
    for (int i = 0; i < LANES; i += 2) {
        part[i] = _mm512_unpacklo_ps(row[i], row[i + 1]);
        part[i + 1] = _mm512_unpackhi_ps(row[i], row[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; j++) {
            const __m512d above = (__m512d)part[i + j], below = (__m512d)part[i + j + 2];
            row[i + 2 * j] = (__m512)_mm512_unpacklo_pd(above, below);
            row[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd(above, below);
        }
    for (int i = 0; i < 4; i++)
        for (int half = 0; half < LANES; half += 8) {
            part[half + i] = _mm512_shuffle_f32x4(row[half + i], row[half + i + 4], 0x88);
            part[half + i + 4] = _mm512_shuffle_f32x4(row[half + i], row[half + i + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        _mm512_storeu_ps(to + i * TILE, _mm512_shuffle_f32x4(part[i], part[i + 8], 0x88));
        _mm512_storeu_ps(to + (i + 8) * TILE, _mm512_shuffle_f32x4(part[i], part[i + 8], 0xdd));
    }
}
#else
#define HAS_SQUARES 0

static inline void transpose_square(const float *from, int64_t dim, float *to)
{
    (void)from, (void)dim, (void)to;
}
#endif

/* Keys [slots, dim] of a tile → [dim, TILE]. Slots that the window lacks get zeros. */
static void transpose(const Slots *slots, int64_t first, float *keys)
{
    const int64_t dim = slots->dim, count = slots->slots - first < TILE ? slots->slots - first : TILE;
    if (count < TILE) memset(keys, 0, (size_t)(dim * TILE) * sizeof *keys);
    const float *from = slots->keys + first * dim;
    int64_t s = 0;
    for (; s + LANES <= count; s += LANES) { /* a vector of slots at a time, so that a line is written at once */
        int64_t d = 0;
        for (; HAS_SQUARES && d + LANES <= dim; d += LANES) transpose_square(from + s * dim + d, dim, keys + d * TILE + s);
        for (; d < dim; d++)
            for (int64_t l = 0; l < LANES; l++) keys[d * TILE + s + l] = from[(s + l) * dim + d];
    }
    for (; s < count; s++)
        for (int64_t d = 0; d < dim; d++) keys[d * TILE + s] = from[s * dim + d];
}

static void find_seen(const Slots *slots, int64_t token, int64_t first, Seen *seen)
{
    const uint8_t *flags = slots->seen ? slots->seen + token * slots->seen_stride : NULL;
    seen->count = 0;
    for (int64_t s = 0; s < TILE; s++) {
        const int is_seen = first + s < slots->slots && (!flags || flags[first + s]);
        seen->mask[s] = is_seen ? 0xffffffffu : 0;
        seen->slot[seen->count] = s;
        seen->count += is_seen;
    }
}

/* Scores [queries, TILE] of `queries` [queries, dim]. */
INLINE void score(const float *query, const float *keys, int64_t dim, float *scores, int queries)
{
    for (int64_t column = 0; column < TILE; column += WIDE * LANES) {
        Vector sum[MOST_QUERIES][WIDE] = {{{0}}};
        for (int64_t d = 0; d < dim; d++) {
            const float *key = keys + d * TILE + column;
            for (int q = 0; q < queries; q++) {
                const Vector all = same(query[q * dim + d]);
                for (int v = 0; v < WIDE; v++) sum[q][v] = fused(all, *(const Vector *)(key + v * LANES), sum[q][v]);
            }
        }
        for (int q = 0; q < queries; q++)
            for (int v = 0; v < WIDE; v++) *(Vector *)(scores + q * TILE + column + v * LANES) = sum[q][v];
    }
}

/* Scores → exponentials of their differences to the largest so far, 0 for slots that are not seen: what is stored there may
   be anything. Returns the factor for what was summed before. There is one copy of this function, so that all queries are
   rounded alike. */
static __attribute__((noinline)) float weigh(float *scores, const Seen *seen, float scale, float *most, float *total)
{
    const Words lowest = (Words)same(-INFINITY);
    Vector top = same(*most), sum = {0};
    for (int64_t s = 0; s < TILE; s += LANES) {
        const Words mask = *(const Words *)(seen->mask + s);
        const Words bits = (Words)(*(const Vector *)(scores + s) * scale);
        const Vector part = (Vector)((bits & mask) | (lowest & ~mask));
        *(Vector *)(scores + s) = part;
        top = larger(top, part);
    }
    float largest = *most;
    for (int l = 0; l < LANES; l++) largest = top[l] > largest ? top[l] : largest;
    for (int64_t s = 0; s < TILE; s += LANES) {
        const Vector part = exponentials(*(const Vector *)(scores + s) - largest);
        *(Vector *)(scores + s) = part;
        sum += part;
    }
    const float less = exponential(*most - largest);
    *most = largest;
    *total *= less;
    for (int l = 0; l < LANES; l++) *total += sum[l];
    return less;
}

/* Add the weighted values of the slots that are seen to `vectors` vectors of the sums [queries, dim]. */
INLINE void add_values(float *sums, const float *less, const float *values, const float *weights, const Seen *seen, int64_t dim,
                       int queries, int vectors)
{
    Vector sum[MOST_QUERIES][WIDE];
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < vectors; v++) sum[q][v] = *(const Vector *)(sums + q * dim + v * LANES) * less[q];
    for (int64_t i = 0; i < seen->count; i++) {
        const int64_t s = seen->slot[i];
        const float *value = values + s * dim;
        for (int q = 0; q < queries; q++) {
            const Vector all = same(weights[q * TILE + s]);
            for (int v = 0; v < vectors; v++) sum[q][v] = fused(all, *(const Vector *)(value + v * LANES), sum[q][v]);
        }
    }
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < vectors; v++) *(Vector *)(sums + q * dim + v * LANES) = sum[q][v];
}

/* Some queries of a token attend to a tile. */
INLINE void attend_tile(const float *query, const float *keys, const float *values, const Seen *seen, int64_t dim, float scale,
                        float *sums, float *most, float *total, int queries)
{
    float weights[MOST_QUERIES * TILE], less[MOST_QUERIES];
    score(query, keys, dim, weights, queries);
    for (int q = 0; q < queries; q++) less[q] = weigh(weights + q * TILE, seen, scale, most + q, total + q);
    int64_t d = 0;
    for (; d + WIDE * LANES <= dim; d += WIDE * LANES) add_values(sums + d, less, values + d, weights, seen, dim, queries, WIDE);
    for (; d + LANES <= dim; d += LANES) add_values(sums + d, less, values + d, weights, seen, dim, queries, 1);
    for (; d < dim; d++)
        for (int q = 0; q < queries; q++) {
            float sum = sums[q * dim + d] * less[q];
            for (int64_t i = 0; i < seen->count; i++)
                sum = fmaf(weights[q * TILE + seen->slot[i]], values[seen->slot[i] * dim + d], sum);
            sums[q * dim + d] = sum;
        }
}

/* All queries of a token attend to a tile. */
static void attend_all(const float *queries, int64_t each, const float *keys, const float *values, const Seen *seen, int64_t dim,
                       float scale, float *sums, float *most, float *total)
{
    int64_t q = 0;
#define ATTEND(count)                                                                                              \
    for (; q + count <= each; q += count)                                                                          \
        attend_tile(queries + q * dim, keys, values, seen, dim, scale, sums + q * dim, most + q, total + q, count);
#if REGISTERS == 32
    ATTEND(4)
    ATTEND(3)
#endif
    ATTEND(2)
    ATTEND(1)
#undef ATTEND
}

void pilotfish_attend_slots(const float *queries, int64_t tokens, int64_t each, const Slots *slots, float scale, float *sums)
{
    const int64_t dim = slots->dim, count = tokens * each;
    float keys[dim * TILE], most[count], total[count];
    Seen seen;
    for (int64_t q = 0; q < count; q++) most[q] = -INFINITY, total[q] = 0.0f;
    memset(sums, 0, (size_t)(count * dim) * sizeof *sums);
    for (int64_t first = 0; first < slots->slots; first += TILE) {
        const float *values = slots->values + first * dim;
        transpose(slots, first, keys);
        for (int64_t t = 0; t < tokens; t++) {
            if (t == 0 || (slots->seen && slots->seen_stride)) find_seen(slots, t, first, &seen);
            const int64_t q = t * each;
            if (!seen.count) continue;
            attend_all(queries + q * dim, each, keys, values, &seen, dim, scale, sums + q * dim, most + q, total + q);
        }
    }
    for (int64_t q = 0; q < count; q++)
        for (int64_t d = 0; d < dim; d++) sums[q * dim + d] /= total[q];
}
