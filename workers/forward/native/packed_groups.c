/* Values of 2, 3, 5 and 6 bits, whose bits are in planes. See packed_groups.h. */

#include "packed_groups.h"

#define AHEAD 4096 /* bytes of weights to prefetch */

typedef uint8_t Bytes __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

/* The planes of a group. The bits of a byte are those of one value, or of two of 4 bits. */
typedef struct {
    int low, high, parts;         /* bits of a value in each plane; bytes that share one of the plane above */
    uint32_t low_bits, high_bits; /* where they are in a byte, in each byte of a word */
} Planes;

static const Planes all_planes[] = {
    [PLANES_2] = {2, 0, 2, 0x33333333u, 0},
    [PLANES_2_1] = {2, 1, 4, 0x33333333u, 0x44444444u},
    [PLANES_4_1] = {4, 1, 8, 0x0f0f0f0fu, 0x10101010u},
    [PLANES_4_2] = {4, 2, 4, 0x0f0f0f0fu, 0x30303030u},
};

INLINE Words shifted(Words bits, const int by)
{
    return by < 0 ? bits >> -by : bits << by;
}

/* Bits that a shift brings from one byte into its neighbour are masked. `subtracted` is taken from each byte. */
INLINE void unpack(const Matrix *matrix, const char *from, char *to, const Planes planes, const int64_t subtracted)
{
    const int64_t bytes = unpacked_bytes(matrix), part = bytes / planes.parts;
    const Bytes less = (Bytes)((Words){0} + (uint32_t)subtracted * 0x01010101u);
    const int half = planes.parts / 2;
    const char *above = from + bytes / 2;
    for (int64_t line = 0; line < bytes / 2 + (planes.high ? part : 0); line += LINE) __builtin_prefetch(from + AHEAD + line, 0, 3);
    for (int64_t i = 0; i < part; i += (int64_t)sizeof(Words)) {
        const Words high = planes.high ? *(const Words *)(above + i) : (Words){0};
#pragma GCC unroll 4
        for (int p = 0; p < half; p++) {
            const Words low = *(const Words *)(from + p * part + i);
            const Words first = (low & planes.low_bits) | (shifted(high, planes.low - planes.high * p) & planes.high_bits);
            const Words second =
                (low >> planes.low & planes.low_bits) | (shifted(high, planes.low - planes.high * (p + half)) & planes.high_bits);
            *(Bytes *)(to + p * part + i) = (Bytes)first - less;
            *(Bytes *)(to + (p + half) * part + i) = (Bytes)second - less;
        }
    }
}

/* Nothing is subtracted from values of 4 bits, of which a byte has two: the compiler leaves a constant zero out. */
void pilotfish_unpack_planes(const Matrix *matrix, const char *from, char *to)
{
    if (matrix->planes == PLANES_2) unpack(matrix, from, to, all_planes[PLANES_2], 0);
    else if (matrix->planes == PLANES_2_1) unpack(matrix, from, to, all_planes[PLANES_2_1], 0);
    else if (matrix->planes == PLANES_4_1) unpack(matrix, from, to, all_planes[PLANES_4_1], matrix->less);
    else unpack(matrix, from, to, all_planes[PLANES_4_2], matrix->less);
}

uint8_t pilotfish_unpacked_byte(const Matrix *matrix, const char *from, int64_t index)
{
    const Planes planes = all_planes[matrix->planes];
    const int64_t bytes = unpacked_bytes(matrix), part = bytes / planes.parts, of = index / part, half = planes.parts / 2;
    const uint8_t low = (uint8_t)from[index % (bytes / 2)];
    const uint8_t high = planes.high ? (uint8_t)from[bytes / 2 + index % part] : 0;
    const int by = planes.low - planes.high * (int)of;
    const int value = (of < half ? low : low >> planes.low) & (int)(planes.low_bits & 0xff);
    return (uint8_t)((value | ((by < 0 ? high >> -by : high << by) & (int)(planes.high_bits & 0xff))) - (int)matrix->less);
}
