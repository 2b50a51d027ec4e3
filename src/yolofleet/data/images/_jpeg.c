/* Decode a rectangle of a JPEG: rows below it are not read, blocks beside and above it are only Huffman-decoded.

   The bytes are those that libjpeg-turbo gives for the whole image with its default settings ("islow" transform, "fancy"
   upsampling), at 1, 1/2, 1/4 or 1/8 of the size; test_jpeg.py compares them. Everything is integer arithmetic, so the
   results are those of every processor.

   Only the common kind of file is decoded: Huffman-coded, sequential, 8 bits, all components in one scan, grey or YCbCr with
   colours at full or half resolution. For any other kind, and for anything unexpected in the data, ``decode`` returns 0, and
   the caller lets OpenCV decode the whole image. So this file repairs nothing, and reports no damage.

   Sources: ITU T.81; the transform is that of Loeffler, Ligtenberg and Moschytz (1989) with IJG's 13-bit constants. */

#define USES_SHUFFLES
#include "../../support/extension.h"
#include <stddef.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pixels are written as little-endian words"
#endif

#define INLINE static inline __attribute__((always_inline))
/* VERSION changes with every change of what the function takes or gives; decode.py uses no other one. */
enum { VERSION = 2, LOOK = 10, MOST_COMPONENTS = 3, END = 128, PADDING = 512, MOST_SIDE = 65500 }; /* that of libjpeg */

typedef struct {
    int x1, y1, x2, y2;
} Box;

/* A Huffman table. ``look``: for the next LOOK bits, 0 if the code is longer, else
   bits of code and value | bits of the code << 8 | bits of the value << 16 | coefficients to advance << 24. */
typedef struct {
    uint32_t look[1 << LOOK];
    uint32_t skim[1 << LOOK]; /* all codes with values in these bits: bits | advance before the last << 8 | advance << 24 */
    int32_t last[17];   /* largest code of each length; -1: none */
    int32_t offset[17]; /* index of a symbol minus its code */
    uint8_t symbols[256];
    uint8_t counts[17];
    int is_given;
} Table;

typedef struct {
    int id, across, down; /* sampling factors */
    int quant, dc, ac;    /* numbers of its tables */
    int side;             /* of a decoded block, samples: 8, 4, 2 or 1 */
    int width, height;    /* samples of the whole image */
    int wide, tall;       /* output pixels for each sample: 1 or 2 */
    Box blocks;           /* that are decoded */
    int predicted, stride;
    uint8_t *plane; /* samples of ``blocks`` */
} Component;

typedef struct {
    const uint8_t *at, *end; /* of the file */
    int width, height, count, interval, reduction, across, down;
    int has_frame, is_jfif, adobe;
    int32_t steps[4][64]; /* of quantisation, in the order of a block */
    uint8_t places[192];   /* of coefficients in a block, by their zigzag order; 64 behind those */
    int has_steps[4];
    Table dc[4], ac[4];
    Component components[MOST_COMPONENTS];
} Jpeg;

typedef struct {
    const uint8_t *at, *end;
    uint64_t bits; /* the next bits, from the top */
    int held;
    int is_bad;
} Reader;

static int least(int a, int b) { return a < b ? a : b; }
static int most(int a, int b) { return a > b ? a : b; }
static int ceil_div(int a, int b) { return (a + b - 1) / b; }

static const uint8_t zigzag[64] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

/* ---- segments before the scan ---- */

static int fill_table(Table *table, int is_dc)
{
    int code = 0, index = 0;
    memset(table->look, 0, sizeof table->look);
    for (int length = 1; length <= 16; length++, code <<= 1) {
        table->offset[length] = index - code;
        for (int i = 0; i < table->counts[length]; i++, code++, index++) {
            const int symbol = table->symbols[index], bits = symbol & 15, run = symbol >> 4;
            if (code >= 1 << length || (is_dc ? symbol > 11 : bits > 10))
                return 0;
            const int advance = is_dc ? 0 : bits || run == 15 ? run + 1 : END;
            const uint32_t entry =
                (uint32_t)(length + bits) | (uint32_t)length << 8 | (uint32_t)bits << 16 | (uint32_t)advance << 24;
            if (length <= LOOK)
                for (int j = 0; j < 1 << (LOOK - length); j++)
                    table->look[(code << (LOOK - length)) + j] = entry;
        }
        table->last[length] = table->counts[length] ? code - 1 : -1;
    }
    for (int i = 0; i < 1 << LOOK && !is_dc; i++) {
        uint32_t bits = 0, before = 0, after = 0;
        while (after < 64) {
            const uint32_t entry = table->look[(i << bits) & ((1 << LOOK) - 1)];
            if (!entry || bits + (entry & 255) > LOOK)
                break;
            bits += entry & 255;
            before = after;
            after += entry >> 24;
        }
        table->skim[i] = bits | before << 8 | after << 24;
    }
    return 1;
}

static int read_tables(Jpeg *jpeg, const uint8_t *at, const uint8_t *end)
{
    while (end - at >= 17) {
        const int kind = at[0] >> 4, number = at[0] & 15;
        if (kind > 1 || number > 3)
            return 0;
        Table *table = kind ? &jpeg->ac[number] : &jpeg->dc[number];
        int symbols = 0;
        for (int i = 1; i <= 16; i++)
            symbols += table->counts[i] = at[i];
        at += 17;
        if (symbols > 256 || end - at < symbols)
            return 0;
        memcpy(table->symbols, at, (size_t)symbols);
        table->is_given = 1;
        at += symbols;
    }
    return at == end;
}

static int read_quant(Jpeg *jpeg, const uint8_t *at, const uint8_t *end)
{
    for (; end - at >= 65; at += 65) {
        if (at[0] > 3) /* a higher number, or 16 bits */
            return 0;
        jpeg->has_steps[at[0]] = 1;
        for (int i = 0; i < 64; i++)
            jpeg->steps[at[0]][zigzag[i]] = at[1 + i];
    }
    return at == end;
}

static int read_frame(Jpeg *jpeg, const uint8_t *at, const uint8_t *end)
{
    if (jpeg->has_frame || end - at < 6 || at[0] != 8)
        return 0;
    jpeg->height = at[1] << 8 | at[2];
    jpeg->width = at[3] << 8 | at[4];
    jpeg->count = at[5];
    if ((jpeg->count != 1 && jpeg->count != 3) || end - at != 6 + 3 * jpeg->count || !jpeg->width || !jpeg->height ||
        most(jpeg->width, jpeg->height) > MOST_SIDE)
        return 0;
    for (int i = 0; i < jpeg->count; i++) {
        Component *component = &jpeg->components[i];
        at += i ? 3 : 6;
        component->id = at[0];
        component->across = at[1] >> 4;
        component->down = at[1] & 15;
        component->quant = at[2];
        const int most_factor = jpeg->count == 1 ? 4 : i ? 1 : 2;
        if (component->across < 1 || component->across > most_factor || component->down < 1 ||
            component->down > most_factor || component->quant > 3)
            return 0;
        if (jpeg->count == 1)
            component->across = component->down = 1; /* a block of its own is an MCU */
    }
    jpeg->across = jpeg->components[0].across;
    jpeg->down = jpeg->components[0].down;
    jpeg->has_frame = 1;
    return 1;
}

static int read_scan(Jpeg *jpeg, const uint8_t *at, const uint8_t *end)
{
    const Component *all = jpeg->components;
    if (!jpeg->has_frame || end - at != 4 + 2 * jpeg->count || at[0] != jpeg->count)
        return 0;
    for (int i = 0; i < jpeg->count; i++) {
        Component *component = &jpeg->components[i];
        const int dc = at[2 + 2 * i] >> 4, ac = at[2 + 2 * i] & 15;
        if (at[1 + 2 * i] != component->id || dc > 3 || ac > 3 || !jpeg->dc[dc].is_given || !jpeg->ac[ac].is_given ||
            !jpeg->has_steps[component->quant])
            return 0;
        component->dc = dc;
        component->ac = ac;
    }
    at += 1 + 2 * jpeg->count;
    const int is_ycc = jpeg->is_jfif || jpeg->adobe == 1 || (jpeg->adobe < 0 && all[0].id == 1 && all[1].id == 2 && all[2].id == 3);
    return at[0] == 0 && at[1] == 63 && at[2] == 0 && (jpeg->count == 1 || is_ycc);
}

/* Read everything up to the data of the scan. */
static int read_segments(Jpeg *jpeg)
{
    const uint8_t *at = jpeg->at + 2;
    jpeg->adobe = -1;
    while (jpeg->end - at >= 4 && at[0] == 0xFF) {
        const int marker = at[1], length = at[2] << 8 | at[3];
        const uint8_t *content = at + 4, *next = at + 2 + length;
        if (length < 2 || length > jpeg->end - at - 2)
            return 0;
        at = next;
        if (marker == 0xC4 ? !read_tables(jpeg, content, next)
            : marker == 0xDB ? !read_quant(jpeg, content, next)
            : marker == 0xC0 || marker == 0xC1 ? !read_frame(jpeg, content, next) : 0)
            return 0;
        if (marker == 0xDD) {
            if (length != 4)
                return 0;
            jpeg->interval = content[0] << 8 | content[1];
        } else if (marker == 0xE0) {
            jpeg->is_jfif |= length >= 16 && !memcmp(content, "JFIF", 5);
        } else if (marker == 0xEE) {
            if (length >= 14 && !memcmp(content, "Adobe", 5))
                jpeg->adobe = content[11];
        } else if (marker == 0xDA) {
            jpeg->at = next;
            return read_scan(jpeg, content, next);
        } else if (marker != 0xC4 && marker != 0xDB && marker != 0xC0 && marker != 0xC1 && marker != 0xFE &&
                   (marker & 0xF0) != 0xE0) {
            return 0;
        }
    }
    return 0;
}

/* ---- Huffman codes ---- */

/* Have 56 bits or more. Reads up to 8 bytes from ``at``. */
INLINE void refill(Reader *reader)
{
    const uint8_t *p = reader->at;
    const uint64_t next = (uint64_t)p[0] << 56 | (uint64_t)p[1] << 48 | (uint64_t)p[2] << 40 | (uint64_t)p[3] << 32 |
                          (uint64_t)p[4] << 24 | (uint64_t)p[5] << 16 | (uint64_t)p[6] << 8 | p[7];
    reader->bits |= next >> reader->held;
    reader->at += (63 - reader->held) >> 3;
    reader->held |= 56;
}

/* Return the entry of a code of more than LOOK bits. */
static uint32_t long_code(Reader *reader, const Table *table)
{
    for (int length = LOOK + 1; length <= 16; length++) {
        const int code = (int)(reader->bits >> (64 - length));
        if (code <= table->last[length]) {
            const int index = table->offset[length] + code;
            if (index < 0 || index > 255)
                break;
            const int symbol = table->symbols[index], bits = symbol & 15, run = symbol >> 4;
            return (uint32_t)(length + bits) | (uint32_t)length << 8 | (uint32_t)bits << 16 |
                   (uint32_t)(bits || run == 15 ? run + 1 : END) << 24;
        }
    }
    reader->is_bad = 1;
    return (uint32_t)END << 24;
}

INLINE uint32_t next_code(Reader *reader, const Table *table)
{
    const uint32_t entry = table->look[reader->bits >> (64 - LOOK)];
    return entry ? entry : long_code(reader, table);
}

INLINE void drop(Reader *reader, uint32_t entry)
{
    reader->bits <<= entry & 255;
    reader->held -= (int)(entry & 255);
}

/* The value behind a code: a number whose first bit is 0 is negative. */
INLINE int value_of(const Reader *reader, uint32_t entry)
{
    const uint64_t rest = reader->bits << (entry >> 8 & 255);
    const int bits = (int)(entry >> 16 & 255), raw = (int)(rest >> 1 >> (63 - bits));
    return raw - (((1 << bits) - 1) & ~(int)((int64_t)rest >> 63));
}

/* Read the first coefficient of a block into ``predicted``. */
INLINE void read_first(const Jpeg *jpeg, Component *component, Reader *reader)
{
    refill(reader);
    const uint32_t entry = next_code(reader, &jpeg->dc[component->dc]);
    component->predicted += value_of(reader, entry);
    drop(reader, entry);
    reader->is_bad |= component->predicted < -2047 || component->predicted > 2047;
}

INLINE int read_next(const uint8_t *places, const Table *ac, Reader *reader, int k, int32_t *block)
{
    const uint32_t entry = next_code(reader, ac);
    k += (int)(entry >> 24);
    block[places[k - 1]] = value_of(reader, entry);
    drop(reader, entry);
    return k;
}

/* Read a block of 64 zeros, and one number more that is ignored. Return how many coefficients, in zigzag order, may differ from 0. */
INLINE int read_block(const Jpeg *jpeg, Component *component, Reader *input, int32_t *block)
{
    const Table *ac = &jpeg->ac[component->ac];
    Reader reader = *input; /* in registers */
    int k = 1, last;
    read_first(jpeg, component, &reader);
    block[0] = component->predicted;
    do {
        refill(&reader); /* two codes with their values have at most 52 bits */
        last = k;
        k = read_next(jpeg->places, ac, &reader, k, block);
        if (k >= 64)
            break;
        last = k;
        k = read_next(jpeg->places, ac, &reader, k, block);
    } while (k < 64);
    reader.is_bad |= k > 64 && k < END;
    *input = reader;
    return k == 64 ? k : last;
}

INLINE int skip_next(const Table *ac, Reader *reader, int k)
{
    uint32_t entry = ac->skim[reader->bits >> (64 - LOOK)];
    if (k + (int)(entry >> 8 & 255) >= 64 || !entry)
        entry = next_code(reader, ac);
    drop(reader, entry);
    return k + (int)(entry >> 24);
}

/* Read a block that nobody sees. */
INLINE void skip_block(const Jpeg *jpeg, Component *component, Reader *input)
{
    const Table *ac = &jpeg->ac[component->ac];
    Reader reader = *input; /* in registers */
    int k = 1;
    read_first(jpeg, component, &reader);
    do {
        refill(&reader);
        k = skip_next(ac, &reader, k);
        if (k >= 64)
            break;
        k = skip_next(ac, &reader, k);
    } while (k < 64);
    reader.is_bad |= k > 64 && k < END;
    *input = reader;
}

/* ---- from coefficients to samples ---- */

#define FIX(x) ((int32_t)((x) * 8192 + 0.5))
#define ROUND(x, bits) (((x) + (1 << ((bits) - 1))) >> (bits))

static inline uint8_t level(int value)
{
    value += 128;
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

typedef int32_t Lanes __attribute__((vector_size(32)));
typedef Lanes Loose __attribute__((aligned(4), may_alias));

/* Transform eight columns of eight coefficients each. */
INLINE void columns_8(Lanes *c, int bits)
{
    const Lanes both = (c[2] + c[6]) * FIX(0.541196100);
    const Lanes low = both - c[6] * FIX(1.847759065), high = both + c[2] * FIX(0.765366865);
    const Lanes sum = (c[0] + c[4]) * 8192, difference = (c[0] - c[4]) * 8192;
    const Lanes e0 = sum + high, e3 = sum - high, e1 = difference + low, e2 = difference - low;
    const Lanes all = (c[7] + c[3] + c[5] + c[1]) * FIX(1.175875602);
    const Lanes z1 = (c[7] + c[1]) * -FIX(0.899976223), z2 = (c[5] + c[3]) * -FIX(2.562915447);
    const Lanes z3 = all - (c[7] + c[3]) * FIX(1.961570560), z4 = all - (c[5] + c[1]) * FIX(0.390180644);
    const Lanes o3 = c[7] * FIX(0.298631336) + z1 + z3, o2 = c[5] * FIX(2.053119869) + z2 + z4;
    const Lanes o1 = c[3] * FIX(3.072711026) + z2 + z3, o0 = c[1] * FIX(1.501321110) + z1 + z4;
    c[0] = ROUND(e0 + o0, bits);
    c[7] = ROUND(e0 - o0, bits);
    c[1] = ROUND(e1 + o1, bits);
    c[6] = ROUND(e1 - o1, bits);
    c[2] = ROUND(e2 + o2, bits);
    c[5] = ROUND(e2 - o2, bits);
    c[3] = ROUND(e3 + o3, bits);
    c[4] = ROUND(e3 - o3, bits);
}

/* Transform eight columns of eight coefficients each to four samples each. */
INLINE void columns_4(Lanes *c, int bits)
{
    const Lanes even = c[2] * FIX(1.847759065) - c[6] * FIX(0.765366865);
    const Lanes e0 = c[0] * 16384 + even, e1 = c[0] * 16384 - even;
    const Lanes o1 = c[5] * FIX(1.451774981) - c[7] * FIX(0.211164243) - c[3] * FIX(2.172734803) + c[1] * FIX(1.061594337);
    const Lanes o0 = c[3] * FIX(0.899976223) - c[7] * FIX(0.509795579) - c[5] * FIX(0.601344887) + c[1] * FIX(2.562915447);
    c[0] = ROUND(e0 + o0, bits);
    c[3] = ROUND(e0 - o0, bits);
    c[1] = ROUND(e1 + o1, bits);
    c[2] = ROUND(e1 - o1, bits);
}

/* Transform eight columns of eight coefficients each to two samples each. */
INLINE void columns_2(Lanes *c, int bits)
{
    const Lanes odd = c[5] * FIX(0.850430095) - c[7] * FIX(0.720959822) - c[3] * FIX(1.272758580) + c[1] * FIX(3.624509785);
    const Lanes even = c[0] * 32768;
    c[0] = ROUND(even + odd, bits);
    c[1] = ROUND(even - odd, bits);
}

/* Swap rows and columns. */
INLINE void turn(Lanes *c)
{
    Lanes a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = __builtin_shufflevector(c[i], c[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        a[i + 1] = __builtin_shufflevector(c[i], c[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = i; j < i + 2; j++) {
            b[j] = __builtin_shufflevector(a[j], a[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            b[j + 2] = __builtin_shufflevector(a[j], a[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        c[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        c[i + 4] = __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* Mark in ``beyond`` the lanes of numbers that do not fit into so many bits and a sign.
   There, implementations of libjpeg-turbo overflow in different ways. */
INLINE void check(const Lanes *c, int n, int bits, Lanes *beyond)
{
    for (int i = 0; i < n; i++)
        *beyond |= (c[i] ^ c[i] >> 31) >> bits;
}

/* Put four columns of levels around 0 into ``bytes``, four bytes for each of eight rows. */
INLINE void four_bytes(Lanes *c, Lanes *bytes)
{
    for (int i = 0; i < 4; i++) {
        c[i] += 128;
        c[i] &= c[i] > 0;
        c[i] = (c[i] | (c[i] > 255)) & 255;
    }
    *bytes = c[0] | c[1] << 8 | c[2] << 16 | c[3] << 24;
}

INLINE int transform_to(const int side, int32_t *block, const int32_t *steps, uint8_t *out, int stride)
{
    Lanes c[8], beyond = {0};
    for (int i = 0; i < 8; i++) {
        c[i] = ((Loose *)block)[i] * ((const Loose *)steps)[i];
        ((Loose *)block)[i] = (Lanes){0};
    }
    check(c, 8, 13, &beyond);
    for (int i = 0; i < 2; i++) {
        if (i)
            turn(c);
        if (side == 8)
            columns_8(c, i ? 18 : 11);
        else if (side == 4)
            columns_4(c, i ? 19 : 12);
        else
            columns_2(c, i ? 20 : 13);
        check(c, side, i ? 9 : 13, &beyond);
    }
    Lanes left, right = {0};
    four_bytes(c, &left);
    if (side == 8)
        four_bytes(c + 4, &right);
    const Lanes halves[2] = {__builtin_shufflevector(left, right, 0, 8, 1, 9, 2, 10, 3, 11),
                             __builtin_shufflevector(left, right, 4, 12, 5, 13, 6, 14, 7, 15)};
    for (int y = 0; y < side; y++)
        memcpy(out + y * stride, (const uint8_t *)halves + 8 * y, side);
    uint64_t each[4];
    memcpy(each, &beyond, sizeof each);
    return !(each[0] | each[1] | each[2] | each[3]);
}

/* Transform a block of coefficients to side x side samples, and fill it with zeros again. Return 0 if a number is out of range. */
WIDE static int transform(int32_t *block, const int32_t *steps, int side, uint8_t *out, int stride)
{
    if (side == 8)
        return transform_to(8, block, steps, out, stride);
    return side == 4 ? transform_to(4, block, steps, out, stride) : transform_to(2, block, steps, out, stride);
}

/* Do the same for a block of equal samples, which only the first coefficient decides. */
static int fill_block(int32_t *block, int count, int step, int side, uint8_t *out, int stride)
{
    const int value = ROUND(block[0] * step, 3);
    if (count > 1)
        memset(block, 0, 64 * sizeof *block);
    for (int y = 0; y < side; y++)
        memset(out + y * stride, level(value), (size_t)side);
    return value >= -512 && value < 512;
}

/* ---- the scan ---- */

/* Copy the data up to the next marker without its stuffed zeros, and with PADDING zeros behind it. Return its length. */
static size_t unstuff(Jpeg *jpeg, uint8_t *to)
{
    uint8_t *const start = to;
    while (jpeg->at < jpeg->end) {
        const uint8_t *mark = memchr(jpeg->at, 0xFF, (size_t)(jpeg->end - jpeg->at));
        const size_t length = (size_t)((mark ? mark : jpeg->end) - jpeg->at);
        memcpy(to, jpeg->at, length);
        to += length;
        jpeg->at += length;
        if (!mark || jpeg->end - mark < 2 || mark[1])
            break;
        *to++ = 0xFF;
        jpeg->at += 2;
    }
    memset(to, 0, PADDING);
    return (size_t)(to - start);
}

/* Decode the blocks of ``components``. ``data``: room for the rest of the file and PADDING. */
WIDE static int decode_scan(Jpeg *jpeg, uint8_t *data)
{
    const int wide = ceil_div(jpeg->width, 8 * jpeg->across);
    int last_row = 0, restarts = 0, left = 0;
    Reader reader = {0};
    int32_t block[65] = {0};
    for (int i = 0; i < jpeg->count; i++)
        last_row = most(last_row, ceil_div(jpeg->components[i].blocks.y2, jpeg->components[i].down) - 1);
    for (int row = 0; row <= last_row; row++) {
        for (int column = 0; column < wide; column++, left--) {
            if (left == 0) {
                if (restarts && (jpeg->end - jpeg->at < 2 || jpeg->at[1] != 0xD0 + ((restarts - 1) & 7)))
                    return 0;
                jpeg->at += restarts++ ? 2 : 0;
                left = jpeg->interval ? jpeg->interval : INT32_MAX;
                reader = (Reader){.at = data, .end = data + unstuff(jpeg, data)};
                for (int i = 0; i < jpeg->count; i++)
                    jpeg->components[i].predicted = 0;
            }
            for (int i = 0; i < jpeg->count; i++) {
                Component *component = &jpeg->components[i];
                const Box *blocks = &component->blocks;
                for (int k = 0; k < component->down * component->across; k++) {
                    const int y = row * component->down + k / component->across;
                    const int x = column * component->across + k % component->across;
                    if (y < blocks->y1 || y >= blocks->y2 || x < blocks->x1 || x >= blocks->x2) {
                        skip_block(jpeg, component, &reader);
                    } else {
                        const int count = read_block(jpeg, component, &reader, block), side = component->side;
                        const int32_t *steps = jpeg->steps[component->quant];
                        uint8_t *out = component->plane + (size_t)(y - blocks->y1) * side * component->stride + (x - blocks->x1) * side;
                        if (side == 1 || count == 1)
                            reader.is_bad |= !fill_block(block, count, steps[0], side, out, component->stride);
                        else
                            reader.is_bad |= !transform(block, steps, side, out, component->stride);
                    }
                    /* a block has fewer bytes than PADDING */
                    if (reader.is_bad || reader.at - reader.held / 8 > reader.end)
                        return 0;
                }
            }
        }
    }
    return 1;
}

/* ---- from samples to pixels ---- */

/* Double n numbers across. ``at`` has a neighbour on each side; the first of a pair is the lower byte. */
INLINE void widen(const int16_t *restrict at, uint16_t *restrict pairs, int n, const int shift, const int even, const int odd)
{
    for (int i = 0; i < n; i++) {
        const int16_t three = (int16_t)(3 * at[i]);
        const uint16_t first = (uint16_t)(three + at[i - 1] + even), second = (uint16_t)(three + at[i + 1] + odd);
        pairs[i] = (uint16_t)(first >> shift | (uint16_t)(second >> shift) << 8);
    }
}

/* Return the levels of columns x1 to x2 of a row of colours, upsampled into ``pairs`` if need be.
   ``pairs`` and ``spare``: room for (x2 - x1) / 2 + 2 pairs and x2 - x1 + 4 numbers. */
WIDE static const uint8_t *colour_row(
    const Component *component, int is_smooth, int y, int x1, int x2, int16_t *restrict spare, uint16_t *restrict pairs)
{
    const int wide = component->wide, tall = component->tall;
    const int above = component->blocks.y1 * component->side, before = component->blocks.x1 * component->side;
    const int near = y / tall, far = most(0, least(y & 1 ? near + 1 : near - 1, component->height - 1));
    const uint8_t *row = component->plane + (ptrdiff_t)(near - above) * component->stride;
    const uint8_t *other = component->plane + (ptrdiff_t)(far - above) * component->stride;
    if (wide == 1 && (tall == 1 || !is_smooth))
        return row + x1 - before;
    const int low = x1 / wide, high = (x2 - 1) / wide + 1, n = high - low; /* the columns that cover them */
    row += low - before;
    other += low - before;
    if (!is_smooth) {
        for (int i = 0; i < n; i++)
            pairs[i] = (uint16_t)(row[i] * 257);
    } else if (wide == 1) {
        const int bias = y & 1 ? 2 : 1;
        for (int i = 0; i < n; i++)
            ((uint8_t *)pairs)[i] = (uint8_t)((3 * row[i] + other[i] + bias) >> 2);
    } else {
        /* spare[i + 1] is of column low + i; behind the border of the image, the last column is repeated */
        const int end = least(high + 1, component->width) - low;
        for (int i = low ? -1 : 0; i < end; i++)
            spare[i + 1] = tall == 2 ? (int16_t)(3 * row[i] + other[i]) : row[i];
        if (low == 0)
            spare[0] = spare[1];
        if (high == component->width)
            spare[n + 1] = spare[n];
        if (tall == 2)
            widen(spare + 1, pairs, n, 4, 8, 7);
        else
            widen(spare + 1, pairs, n, 2, 1, 2);
    }
    return (const uint8_t *)pairs + (wide == 2 ? x1 & 1 : 0);
}

static inline uint8_t clipped(int value) { return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value); }

WIDE static void mix_row(const uint8_t *restrict luma, const uint8_t *restrict blues, const uint8_t *restrict reds, int n, uint32_t *restrict out)
{
    for (int i = 0; i < n; i++) {
        const int y = luma[i], cb = blues[i] - 128, cr = reds[i] - 128;
        const int b = clipped(y + ((116130 * cb + 32768) >> 16));
        const int g = clipped(y + ((-22554 * cb - 46802 * cr + 32768) >> 16));
        const int r = clipped(y + ((91881 * cr + 32768) >> 16));
        out[i] = (uint32_t)(b | g << 8 | r << 16);
    }
}

#ifdef SHUFFLES
SHUFFLES static void pack_row(const uint32_t *in, uint8_t *out, int n)
{
    const __m128i gather = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    int i = 0;
    for (; i + 6 <= n; i += 4)
        _mm_storeu_si128((__m128i *)(out + 3 * i), _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(in + i)), gather));
    for (; i < n; i++)
        for (int c = 0; c < 3; c++)
            out[3 * i + c] = (uint8_t)(in[i] >> 8 * c);
}
#else
static void pack_row(const uint32_t *in, uint8_t *out, int n)
{
    for (int i = 0; i < n; i++)
        for (int c = 0; c < 3; c++)
            out[3 * i + c] = (uint8_t)(in[i] >> 8 * c);
}
#endif
/* Fill ``seen`` of ``out``, pixels of three bytes, ``width`` of them a row. ``spare``: ten bytes for each column of ``seen``, and 80. */
static void write_pixels(const Jpeg *jpeg, Box seen, uint8_t *out, int width, uint32_t *spare)
{
    const int n = seen.x2 - seen.x1;
    const Component *luma = &jpeg->components[0];
    uint32_t *pixels = spare;
    uint16_t *pairs = (uint16_t *)(pixels + n);
    const int room = n + 8;
    for (int y = seen.y1; y < seen.y2; y++) {
        const uint8_t *levels[3];
        levels[0] = luma->plane + (size_t)(y - luma->blocks.y1 * luma->side) * luma->stride + seen.x1 - luma->blocks.x1 * luma->side;
        uint8_t *to = out + 3 * ((size_t)y * width + seen.x1);
        for (int i = 1; i < jpeg->count; i++) {
            const Component *colour = &jpeg->components[i];
            const int is_smooth = jpeg->reduction < 8 && (colour->wide == 1 || colour->width > 2);
            levels[i] = colour_row(colour, is_smooth, y, seen.x1, seen.x2, (int16_t *)pairs, pairs + i * room);
        }
        if (jpeg->count == 3) {
            mix_row(levels[0], levels[1], levels[2], n, pixels);
            pack_row(pixels, to, n);
        } else {
            for (int i = 0; i < n; i++)
                to[3 * i] = to[3 * i + 1] = to[3 * i + 2] = levels[0][i];
        }
    }
}

/* Choose the blocks that ``seen`` needs. Return the bytes of their samples. */
static size_t choose_blocks(Jpeg *jpeg, Box seen)
{
    size_t bytes = 0;
    const int smallest = 8 / jpeg->reduction;
    for (int i = 0; i < jpeg->count; i++) {
        Component *component = &jpeg->components[i];
        int wide = jpeg->across / component->across, tall = jpeg->down / component->down, side = smallest;
        /* libjpeg transforms blocks of colours to more samples rather than upsample them, if both directions allow it */
        while (side < 8 && wide * smallest % (2 * side) == 0 && tall * smallest % (2 * side) == 0)
            side *= 2;
        component->side = side;
        component->wide = wide = wide * smallest / side;
        component->tall = tall = tall * smallest / side;
        component->width = ceil_div(jpeg->width * component->across * side, 8 * jpeg->across);
        component->height = ceil_div(jpeg->height * component->down * side, 8 * jpeg->down);
        const int x1 = most(0, seen.x1 / wide - (wide - 1)), x2 = least((seen.x2 - 1) / wide + wide, component->width);
        const int y1 = most(0, seen.y1 / tall - (tall - 1)), y2 = least((seen.y2 - 1) / tall + tall, component->height);
        component->blocks = (Box){x1 / side, y1 / side, ceil_div(x2, side), ceil_div(y2, side)};
        component->stride = (component->blocks.x2 - component->blocks.x1) * side;
        bytes += (size_t)component->stride * (size_t)(component->blocks.y2 - component->blocks.y1) * (size_t)side;
    }
    return bytes;
}

/* Return the bytes of the file that were read, 0 if it is not of the kind that is decoded here, or -1 without memory. */
static Py_ssize_t decode_seen(Jpeg *jpeg, const uint8_t *file, Box seen, uint8_t *out, int height, int width)
{
    if (jpeg->end - jpeg->at < 4 || jpeg->at[0] != 0xFF || jpeg->at[1] != 0xD8 || !read_segments(jpeg) ||
        ceil_div(jpeg->width, jpeg->reduction) != width || ceil_div(jpeg->height, jpeg->reduction) != height)
        return 0;
    memset(jpeg->places, 64, sizeof jpeg->places);
    memcpy(jpeg->places, zigzag, sizeof zigzag);
    for (int i = 0; i < jpeg->count; i++) {
        Component *component = &jpeg->components[i];
        if (!fill_table(&jpeg->dc[component->dc], 1) || !fill_table(&jpeg->ac[component->ac], 0))
            return 0;
    }
    const size_t planes = choose_blocks(jpeg, seen), rows = 10 * (size_t)(seen.x2 - seen.x1 + 8);
    uint8_t *memory = PyMem_RawMalloc(planes + rows + (size_t)(jpeg->end - jpeg->at) + PADDING);
    if (!memory)
        return -1;
    uint8_t *plane = memory + rows;
    for (int i = 0; i < jpeg->count; i++) {
        Component *component = &jpeg->components[i];
        component->plane = plane;
        plane += (size_t)component->stride * (size_t)(component->blocks.y2 - component->blocks.y1) * (size_t)component->side;
    }
    const int is_done = decode_scan(jpeg, plane);
    if (is_done)
        write_pixels(jpeg, seen, out, width, (uint32_t *)memory);
    PyMem_RawFree(memory);
    return is_done ? jpeg->at - file : 0;
}

/* ---- Python ---- */

static PyObject *decode(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *content, *array;
    Py_buffer file, out;
    Box seen;
    int reduction;
    Py_ssize_t read = -1;
    if (!PyArg_ParseTuple(args, "Oi(iiii)O", &content, &reduction, &seen.x1, &seen.y1, &seen.x2, &seen.y2, &array) ||
        PyObject_GetBuffer(content, &file, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(array, &out, PyBUF_CONTIG) < 0) {
        PyBuffer_Release(&file);
        return NULL;
    }
    Jpeg *jpeg = NULL;
    if (out.ndim != 3 || out.itemsize != 1 || out.shape[2] != 3 || out.shape[0] > 65535 || out.shape[1] > 65535 ||
        seen.x1 < 0 || seen.x1 >= seen.x2 || seen.x2 > out.shape[1] || seen.y1 < 0 || seen.y1 >= seen.y2 ||
        seen.y2 > out.shape[0] || (reduction != 1 && reduction != 2 && reduction != 4 && reduction != 8)) {
        PyErr_SetString(PyExc_ValueError, "wrong reduction, or pixels that are not uint8 [h, w, 3] with the rectangle in them");
    } else if (!(jpeg = PyMem_RawCalloc(1, sizeof *jpeg))) {
        PyErr_NoMemory();
    } else {
        jpeg->at = file.buf;
        jpeg->end = jpeg->at + file.len;
        jpeg->reduction = reduction;
        Py_BEGIN_ALLOW_THREADS
        read = decode_seen(jpeg, file.buf, seen, out.buf, (int)out.shape[0], (int)out.shape[1]);
        Py_END_ALLOW_THREADS
        if (read < 0)
            PyErr_NoMemory();
    }
    PyMem_RawFree(jpeg);
    PyBuffer_Release(&file);
    PyBuffer_Release(&out);
    return read < 0 ? NULL : PyLong_FromSsize_t(read);
}

static PyMethodDef functions[] = {
    {"decode", decode, METH_VARARGS, "decode(file, reduction, (x1, y1, x2, y2), out) -> bytes that were read, or 0"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_jpeg", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__jpeg(void)
{
    return new_module(&definition, VERSION);
}
