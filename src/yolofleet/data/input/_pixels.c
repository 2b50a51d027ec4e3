/* The loops over pixels of data/input/augment.py, which has the same functions in NumPy and OpenCV. Both give the same bytes.

   Rows are processed one after the other, so what a row needs stays in the nearest cache. Everything is integer
   arithmetic, or float operations that IEEE 754 rounds in one way only: the results are those of every processor.
   Compile without contraction (-ffp-contract=off), because a fused multiply-add rounds once where two operations
   round twice. A pixel is an int: first channel | second << 8 | third << 16. */

#define USES_SHUFFLES
#include "../../support/extension.h"
#include <math.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pixels are read as little-endian words"
#endif

/* VERSION changes with every change of what the functions take or give; pixels.py uses no other one. */
enum { VERSION = 1, FILL = 114, MOST_TILES = 16, LARGEST_SIDE = 1 << 16 };

typedef struct {
    int recoloured, mirrored, upside_down;
    float hue, saturation, value;
} Look;

typedef struct {
    Py_buffer image;
    long left, top;
} Tile;

/* ---- colour ---- */

static inline float less(float a, float b) { return a < b ? a : b; }
static inline float more(float a, float b) { return a > b ? a : b; }
static inline float whole(float a) { return (float)(int)a; }
static inline float clip(float a, float low, float high) { return less(more(a, low), high); }

/* BGR pixels -> HSV, times the gains, -> RGB pixels. Hue has the period 180, so 30 units are a sixth of the circle.
   All numbers are below 2**24, so float holds products and sums of whole ones exactly. */
WIDE static void recolour_row(const uint32_t *restrict in, uint32_t *restrict out, int n, const Look *look)
{
    const float hue = look->hue, saturation = look->saturation, value = look->value;
    for (int i = 0; i < n; i++) {
        const int p = (int)in[i];
        const float b = (float)(p & 255), g = (float)(p >> 8 & 255), r = (float)(p >> 16 & 255);
        float v = more(more(b, g), r);
        const float d = v - less(less(b, g), r);
        /* COLOR_BGR2HSV of OpenCV: reciprocals with 12 bits, 255 * 4096 / v and 30 * 4096 / d, here from one division */
        const float v1 = more(v, 1), d1 = more(d, 1), both = 4096 / (v1 * d1);
        const float per_v = whole(255 * d1 * both + 0.5f), per_d = whole(30 * v1 * both + 0.5f);
        float s = whole(d * per_v * (1.0f / 4096) + 0.5f);
        const float from_red = g - b, from_green = b - r + 2 * d, from_blue = r - g + 4 * d;
        float h = v == g ? from_green : from_blue;
        h = v == r ? from_red : h;
        h = whole(h * per_d * (1.0f / 4096) + 180.5f);
        h = h < 180 ? h : h - 180;
        h = whole(h * hue);
        h = h < 180 ? h : h - 180;
        s = less(whole(s * saturation), 255);
        v = less(whole(v * value), 255);
        /* A channel falls from v to v - v s / 255 while the hue moves away from its own, from 30 units to 60. */
        const float fall = v * s * (1.0f / 7650), top = v + 0.5f, high = top + 30 * fall;
        const int red = (int)(top - 60 * fall + fall * clip(fabsf(h - 90), 30, 60));
        const int green = (int)(high - fall * clip(fabsf(h - 60), 30, 60));
        const int blue = (int)(high - fall * clip(fabsf(h - 120), 30, 60));
        out[i] = (uint32_t)(red | green << 8 | blue << 16);
    }
}

/* BGR pixels -> RGB pixels */
WIDE static void swap_row(const uint32_t *restrict in, uint32_t *restrict out, int n)
{
    for (int i = 0; i < n; i++)
        out[i] = (in[i] & 0xff00) | in[i] >> 16 | in[i] << 16;
}

/* ---- three bytes a pixel <-> one int a pixel ---- */

static void unpack_row_plain(const uint8_t *in, uint32_t *out, int n)
{
    for (int i = 0; i < n; i++)
        out[i] = (uint32_t)(in[3 * i] | in[3 * i + 1] << 8 | in[3 * i + 2] << 16);
}

static void pack_row_plain(const uint32_t *in, uint8_t *out, int n)
{
    for (int i = 0; i < n; i++)
        for (int c = 0; c < 3; c++)
            out[3 * i + c] = (uint8_t)(in[i] >> 8 * c);
}

#ifdef SHUFFLES
/* Four pixels at a time: 16 bytes are read where 12 are needed, and the next 12 cover 4 that were written. */
SHUFFLES static void unpack_row(const uint8_t *in, uint32_t *out, int n)
{
    const __m128i spread = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
    int i = 0;
    for (; i + 6 <= n; i += 4)
        _mm_storeu_si128((__m128i *)(out + i), _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(in + 3 * i)), spread));
    unpack_row_plain(in + 3 * i, out + i, n - i);
}

SHUFFLES static void pack_row(const uint32_t *in, uint8_t *out, int n)
{
    const __m128i gather = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    int i = 0;
    for (; i + 6 <= n; i += 4)
        _mm_storeu_si128((__m128i *)(out + 3 * i), _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(in + i)), gather));
    pack_row_plain(in + i, out + 3 * i, n - i);
}
#else
#define unpack_row unpack_row_plain
#define pack_row pack_row_plain
#endif

static void mirror_row(uint32_t *row, int n)
{
    for (int i = 0, j = n - 1; i < j; i++, j--) {
        const uint32_t kept = row[i];
        row[i] = row[j];
        row[j] = kept;
    }
}

/* BGR pixels -> the row of ``out`` that shows them. ``spare``: n pixels. */
static void finish_row(const uint32_t *in, uint32_t *spare, int n, const Look *look, uint8_t *out, int y, int rows)
{
    if (look->recoloured)
        recolour_row(in, spare, n, look);
    else
        swap_row(in, spare, n);
    if (look->mirrored)
        mirror_row(spare, n);
    pack_row(spare, out + (size_t)3 * n * (look->upside_down ? rows - 1 - y : y), n);
}

/* ---- resize, with OpenCV's coefficients for INTER_LINEAR: 11 bits a side ---- */

typedef struct {
    int from;           /* first of two neighbours */
    int16_t weights[2]; /* of 2048 */
} Mean;

/* Fill ``means`` for each of ``to`` pixels made from ``from``; keep_edges: the second neighbour always exists. */
static void prepare_means(Mean *means, int from, int to, int keep_edges)
{
    const double scale = (double)from / to;
    for (int i = 0; i < to; i++) {
        float at = (float)((i + 0.5) * scale - 0.5);
        int first = (int)floorf(at);
        at -= (float)first;
        if (keep_edges && (first < 0 || first >= from - 1)) {
            first = first < 0 ? 0 : from - 1;
            at = 0;
        }
        means[i].from = first;
        means[i].weights[0] = (int16_t)lrintf((1.0f - at) * 2048);
        means[i].weights[1] = (int16_t)lrintf(at * 2048);
    }
}

/* Pixels of three bytes -> weighted means of neighbours, four numbers a pixel. Reads two bytes past the second. */
#ifdef SHUFFLES
SHUFFLES static void squeeze_row(const uint8_t *row, const Mean *means, int n, int16_t *out)
{
    const __m128i pairs = _mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1);
    for (int i = 0; i < n; i++) {
        int weights;
        memcpy(&weights, means[i].weights, 4);
        __m128i both = _mm_loadl_epi64((const __m128i *)(row + 3 * means[i].from));
        both = _mm_madd_epi16(_mm_shuffle_epi8(both, pairs), _mm_set1_epi32(weights));
        both = _mm_srai_epi32(both, 4);
        _mm_storel_epi64((__m128i *)(out + 4 * i), _mm_packs_epi32(both, both));
    }
}
#else
static void squeeze_row(const uint8_t *row, const Mean *means, int n, int16_t *out)
{
    for (int i = 0; i < n; i++) {
        const uint8_t *p = row + 3 * means[i].from;
        for (int c = 0; c < 3; c++)
            out[4 * i + c] = (int16_t)((p[c] * means[i].weights[0] + p[c + 3] * means[i].weights[1]) >> 4);
        out[4 * i + 3] = 0;
    }
}
#endif

/* Two squeezed rows -> n pixels */
WIDE static void mean_of_rows(
    const int16_t *restrict upper, const int16_t *restrict lower, Mean mean, int n, uint8_t *restrict out)
{
    const int16_t above = mean.weights[0], below = mean.weights[1];
    for (int i = 0; i < 4 * n; i++) {
        const int16_t from_above = (int16_t)((upper[i] * above) >> 16);
        const int16_t from_below = (int16_t)((lower[i] * below) >> 16);
        out[i] = (uint8_t)((int16_t)(from_above + from_below + 2) >> 2);
    }
}

/* Paint row y of the canvas from column x1 to x2. */
static void paint_row(const Tile *tiles, int count, long canvas, long y, long x1, long x2, uint8_t *row)
{
    memset(row, FILL, (size_t)(3 * (x2 - x1)));
    for (int k = 0; k < count; k++) {
        const long height = (long)tiles[k].image.shape[0], width = (long)tiles[k].image.shape[1];
        const long top = tiles[k].top, left = tiles[k].left;
        if (y < 0 || y >= canvas || y < top || y >= top + height)
            continue;
        long from = left > x1 ? left : x1, to = left + width < x2 ? left + width : x2;
        from = from > 0 ? from : 0;
        to = to < canvas ? to : canvas;
        if (from < to)
            memcpy(row + 3 * (from - x1), (const uint8_t *)tiles[k].image.buf + 3 * ((y - top) * width + from - left),
                   (size_t)(3 * (to - from)));
    }
}

typedef struct {
    long x1, y1, side; /* square, in pixels of the canvas */
    long canvas;
} Window;

static int render_rows(const Tile *tiles, int count, Window window, const Look *look, uint8_t *out, int n)
{
    const int side = (int)window.side;
    Mean *across = PyMem_RawMalloc(2 * (size_t)n * sizeof(Mean));
    int16_t *squeezed = PyMem_RawMalloc(2 * 4 * (size_t)n * sizeof(int16_t));
    uint32_t *pixels = PyMem_RawMalloc(2 * (size_t)n * sizeof(uint32_t));
    uint8_t *row = PyMem_RawCalloc(3 * (size_t)side + 8, 1); /* the last neighbours are read past the end */
    const int fits = across && squeezed && pixels && row;
    if (fits) {
        Mean *down = across + n;
        int16_t *rows[2] = {squeezed, squeezed + 4 * (size_t)n};
        int held[2] = {-1, -1};
        prepare_means(across, side, n, 1);
        prepare_means(down, side, n, 0);
        for (int y = 0; y < n; y++) {
            int16_t *both[2];
            int wanted[2];
            for (int k = 0; k < 2; k++) {
                const int at = down[y].from + k;
                wanted[k] = at < 0 ? 0 : at < side ? at : side - 1;
            }
            for (int k = 0; k < 2; k++) {
                int slot = held[0] == wanted[k] ? 0 : held[1] == wanted[k] ? 1 : -1;
                if (slot < 0) {
                    slot = held[0] == wanted[1 - k] ? 1 : 0; /* keep the row that is needed too */
                    paint_row(tiles, count, window.canvas, window.y1 + wanted[k], window.x1, window.x1 + side, row);
                    squeeze_row(row, across, n, rows[slot]);
                    held[slot] = wanted[k];
                }
                both[k] = rows[slot];
            }
            mean_of_rows(both[0], both[1], down[y], n, (uint8_t *)pixels);
            if (look)
                finish_row(pixels, pixels + n, n, look, out, y, n);
            else
                pack_row(pixels, out + (size_t)3 * n * y, n);
        }
    }
    PyMem_RawFree(across);
    PyMem_RawFree(squeezed);
    PyMem_RawFree(pixels);
    PyMem_RawFree(row);
    return fits;
}

/* ---- Python ---- */

static int get_pixels(PyObject *array, Py_buffer *view, int writable)
{
    if (PyObject_GetBuffer(array, view, writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO) < 0)
        return 0;
    if (view->ndim == 3 && view->itemsize == 1 && view->shape[2] == 3 && view->shape[0] > 0 && view->shape[1] > 0 &&
        view->shape[0] < LARGEST_SIDE && view->shape[1] < LARGEST_SIDE)
        return 1;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_ValueError, "pixels must be uint8 [h, w, 3], contiguous");
    return 0;
}

/* ((hue, saturation, value) or None, mirrored, upside_down) */
static int get_look(PyObject *tuple, Look *look)
{
    PyObject *gains;
    memset(look, 0, sizeof *look);
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "a look is a tuple");
        return 0;
    }
    if (!PyArg_ParseTuple(tuple, "Opp", &gains, &look->mirrored, &look->upside_down))
        return 0;
    look->recoloured = gains != Py_None;
    if (!look->recoloured)
        return 1;
    if (!PyTuple_Check(gains) || !PyArg_ParseTuple(gains, "fff", &look->hue, &look->saturation, &look->value)) {
        PyErr_SetString(PyExc_TypeError, "gains are three numbers");
        return 0;
    }
    if (look->hue >= 0 && look->hue <= 2 && look->saturation >= 0 && look->saturation < 1e6f && look->value >= 0 &&
        look->value < 1e6f)
        return 1;
    PyErr_SetString(PyExc_ValueError, "gains must be positive, and that of the hue at most 2");
    return 0;
}

/* Sums of a few such values do not overflow; labs(LONG_MIN) does. */
static int in_range(long value)
{
    return value > -LARGEST_SIDE && value < LARGEST_SIDE;
}

static int get_tile(PyObject *tuple, Tile *tile)
{
    PyObject *image;
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "a tile is (image, left, top)");
        return 0;
    }
    if (!PyArg_ParseTuple(tuple, "Oll", &image, &tile->left, &tile->top))
        return 0;
    if (!in_range(tile->left) || !in_range(tile->top)) {
        PyErr_SetString(PyExc_ValueError, "position of a tile out of range");
        return 0;
    }
    return get_pixels(image, &tile->image, 0);
}

static PyObject *render(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *list, *array, *style;
    Window window;
    Look look;
    if (!PyArg_ParseTuple(args, "O!(lll)lOO", &PyList_Type, &list, &window.x1, &window.y1, &window.side,
                          &window.canvas, &style, &array))
        return NULL;
    if (window.side < 1 || !in_range(window.side) || !in_range(window.x1) || !in_range(window.y1) ||
        window.canvas < 1 || !in_range(window.canvas) || PyList_GET_SIZE(list) > MOST_TILES)
        return PyErr_Format(PyExc_ValueError, "window, canvas or number of tiles out of range");
    if (style != Py_None && !get_look(style, &look))
        return NULL;
    Py_buffer out;
    if (!get_pixels(array, &out, 1))
        return NULL;
    Tile tiles[MOST_TILES];
    int count = 0, painted = 0;
    for (; count < (int)PyList_GET_SIZE(list); count++) {
        if (!get_tile(PyList_GET_ITEM(list, count), &tiles[count]))
            goto done;
    }
    if (out.shape[0] != out.shape[1]) {
        PyErr_SetString(PyExc_ValueError, "the output must be square");
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    painted = render_rows(tiles, count, window, style == Py_None ? NULL : &look, out.buf, (int)out.shape[0]);
    Py_END_ALLOW_THREADS
    if (!painted)
        PyErr_NoMemory();
done:
    while (count > 0)
        PyBuffer_Release(&tiles[--count].image);
    PyBuffer_Release(&out);
    if (!painted)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *finish(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *source, *style, *array;
    Py_buffer in, out;
    Look look;
    if (!PyArg_ParseTuple(args, "OOO", &source, &style, &array) || !get_look(style, &look) ||
        !get_pixels(source, &in, 0))
        return NULL;
    if (!get_pixels(array, &out, 1)) {
        PyBuffer_Release(&in);
        return NULL;
    }
    uint32_t *pixels = NULL;
    if (in.shape[0] != out.shape[0] || in.shape[1] != out.shape[1]) {
        PyErr_SetString(PyExc_ValueError, "input and output must have one size");
    } else if (!(pixels = PyMem_RawMalloc(2 * (size_t)in.shape[1] * sizeof(uint32_t)))) {
        PyErr_NoMemory();
    } else {
        const int rows = (int)in.shape[0], n = (int)in.shape[1];
        Py_BEGIN_ALLOW_THREADS
        for (int y = 0; y < rows; y++) {
            unpack_row((const uint8_t *)in.buf + (size_t)3 * n * y, pixels, n);
            finish_row(pixels, pixels + n, n, &look, out.buf, y, rows);
        }
        Py_END_ALLOW_THREADS
        PyMem_RawFree(pixels);
    }
    PyBuffer_Release(&in);
    PyBuffer_Release(&out);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"render", render, METH_VARARGS, "render(tiles, (x1, y1, side), canvas, look or None, out)"},
    {"finish", finish, METH_VARARGS, "finish(image, look, out)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_pixels", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__pixels(void)
{
    return new_module(&definition, VERSION);
}
