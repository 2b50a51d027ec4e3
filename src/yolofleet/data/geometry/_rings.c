/* The loops over points of data/geometry/rings.py, which has the same functions in NumPy. Both give the same bits, because every
   operation rounds by itself (-ffp-contract=off) and sums have the same order.

   n labels, R rings, P points. A window is x and y of its lower and of its upper corner. */

#include "../../support/extension.h"
#include <math.h>

/* VERSION changes with every change of what the functions take or give; rings.py uses no other one. */
enum { VERSION = 2, MOST_FACTOR = 6, LARGEST_SIDE = 1 << 16 };
static const double SMALLEST_AREA = 1e-9, NUDGE = 1e-6; /* as in rings.py */

typedef struct {
    double at[2];
} Point;

typedef struct {
    const Point *points;
    const int64_t *lengths, *counts;
    Py_ssize_t labels;
} Rings;

static inline double less(double a, double b) { return a < b ? a : b; }
static inline double more(double a, double b) { return a > b ? a : b; }
/* Of numbers that are not negative. */
static inline int64_t down(double a) { return (int64_t)a; }
static inline int64_t up(double a) { return (int64_t)a + (a > (double)(int64_t)a); }

/* ---- choose ---- */

/* Copy the rings of the chosen labels; returns 0 without memory. ``size`` is that of a point. */
static int take_rings(const uint8_t *points, Py_ssize_t size, Rings in, const int64_t *numbers, Py_ssize_t chosen,
                      PyObject **out)
{
    int64_t *firsts = PyMem_RawMalloc((size_t)(2 * in.labels + 1) * sizeof(int64_t)); /* of rings and points */
    int64_t rings = 0, total = 0;
    if (!firsts)
        return 0;
    for (Py_ssize_t label = 0; label < in.labels; label++) {
        firsts[2 * label] = rings;
        firsts[2 * label + 1] = total;
        for (int64_t r = 0; r < in.counts[label]; r++)
            total += in.lengths[rings++];
    }
    const int64_t ends[2] = {rings, total};
    rings = total = 0;
    for (Py_ssize_t i = 0; i < chosen; i++) {
        const int64_t *first = firsts + 2 * numbers[i], *next = numbers[i] + 1 < in.labels ? first + 2 : ends;
        rings += next[0] - first[0];
        total += next[1] - first[1];
    }
    out[0] = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)total * size);
    out[1] = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)rings * 8);
    out[2] = PyByteArray_FromStringAndSize(NULL, chosen * 8);
    if (out[0] && out[1] && out[2]) {
        char *to_points = PyByteArray_AS_STRING(out[0]), *to_lengths = PyByteArray_AS_STRING(out[1]);
        char *to_counts = PyByteArray_AS_STRING(out[2]);
        for (Py_ssize_t i = 0; i < chosen; i++) {
            const int64_t *first = firsts + 2 * numbers[i], *next = numbers[i] + 1 < in.labels ? first + 2 : ends;
            const size_t of_points = (size_t)((next[1] - first[1]) * size), of_rings = (size_t)(next[0] - first[0]) * 8;
            memcpy(to_points, points + first[1] * size, of_points);
            memcpy(to_lengths, in.lengths + first[0], of_rings);
            memcpy(to_counts + 8 * i, in.counts + numbers[i], 8);
            to_points += of_points;
            to_lengths += of_rings;
        }
    }
    PyMem_RawFree(firsts);
    return out[0] && out[1] && out[2];
}

/* ---- cut rings by a window ---- */

/* Keep the part of a ring on one side of a line (Sutherland and Hodgman); returns the number of points. */
static int64_t clip_side(const Point *in, int64_t n, int axis, double bound, double sign, Point *out)
{
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        const Point *start = in + i, *stop = in + (i + 1 < n ? i + 1 : 0);
        const int is_in = (start->at[axis] - bound) * sign >= 0, next_in = (stop->at[axis] - bound) * sign >= 0;
        if (is_in)
            out[count++] = *start;
        if (is_in == next_in)
            continue;
        const double share = (bound - start->at[axis]) / (stop->at[axis] - start->at[axis]);
        Point crossing;
        for (int k = 0; k < 2; k++)
            crossing.at[k] = start->at[k] + share * (stop->at[k] - start->at[k]);
        crossing.at[axis] = bound;
        out[count++] = crossing;
    }
    return count;
}

/* Widen the box by the ends of the edges that are not on the border; return whether a point is a corner of the window. */
static int widen_box(const Point *ring, int64_t n, const double window[4], double box[4])
{
    int at_corner = 0;
    for (int64_t i = 0; i < n; i++) {
        const Point ends[2] = {ring[i], ring[i + 1 < n ? i + 1 : 0]};
        int on_border = 0, sides = 0;
        for (int k = 0; k < 2; k++) {
            const int at_side = ends[0].at[k] == window[k] || ends[0].at[k] == window[2 + k];
            sides += at_side;
            on_border |= at_side && ends[0].at[k] == ends[1].at[k];
        }
        at_corner |= sides == 2;
        for (int end = 0; end < 2 && !on_border; end++) {
            for (int k = 0; k < 2; k++) {
                box[k] = less(box[k], ends[end].at[k]);
                box[2 + k] = more(box[2 + k], ends[end].at[k]);
            }
        }
    }
    return at_corner;
}

/* How often a ring winds around a point. */
static int winding(const Point *ring, int64_t n, double at_x, double at_y)
{
    int turns = 0;
    for (int64_t i = 0; i < n; i++) {
        const double x = ring[i].at[0], y = ring[i].at[1];
        const Point *next = ring + (i + 1 < n ? i + 1 : 0);
        if ((y <= at_y) == (next->at[1] <= at_y))
            continue;
        const double slope = (next->at[0] - x) / (next->at[1] - y);
        if (x + (at_y - y) * slope > at_x)
            turns += next->at[1] > y ? 1 : -1;
    }
    return turns;
}

/* How the points of each label move before the cut: times a factor plus an offset; turned: in the other direction. */
typedef struct {
    const Point *factors, *offsets;
    int turned, is_double;
} Move;

/* Write the moved ring that begins at point ``first`` of ``points``, which are float or double. */
static void move_ring(const void *points, int64_t first, int64_t n, const Move *move, Py_ssize_t label, Point *out)
{
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = 2 * (first + (move->turned ? n - 1 - i : i));
        for (int k = 0; k < 2; k++) {
            const double value = move->is_double ? ((const double *)points)[at + k] : ((const float *)points)[at + k];
            out[i].at[k] = value * move->factors[label].at[k] + move->offsets[label].at[k];
        }
    }
}

/* ``spare`` has room for the points of a label once, and MOST_FACTOR times twice. */
static void cut_rings(Rings in, const Move *move, const double window[4], Point *spare, int64_t most, Point *points,
                      int64_t *lengths, int64_t *counts, uint8_t *is_cut, double *boxes, int64_t *written)
{
    const int64_t *length = in.lengths;
    int64_t rings = 0, total = 0, done = 0;
    for (Py_ssize_t label = 0; label < in.labels; label++) {
        const Point *first = spare, *next = first;
        double box[4] = {INFINITY, INFINITY, -INFINITY, -INFINITY};
        int at_corner = 0;
        is_cut[label] = 0;
        counts[label] = 0;
        for (int64_t r = 0; r < in.counts[label]; done += length[r++]) {
            move_ring(in.points, done, length[r], move, label, spare + (next - first));
            for (int64_t i = 0; i < length[r]; i++, next++)
                for (int k = 0; k < 2; k++)
                    is_cut[label] |= next->at[k] < window[k] || next->at[k] > window[2 + k];
        }
        next = first;
        for (int64_t r = 0; r < in.counts[label]; r++) {
            const Point *ring = next;
            int64_t n = length[r];
            next += n;
            if (is_cut[label]) {
                Point *from = spare + most, *to = from + MOST_FACTOR * most;
                n = clip_side(ring, n, 0, window[0], 1, from);
                n = clip_side(from, n, 0, window[2], -1, to);
                n = clip_side(to, n, 1, window[1], 1, from);
                n = clip_side(from, n, 1, window[3], -1, to);
                ring = to;
            }
            if (!n)
                continue;
            at_corner |= widen_box(ring, n, window, box);
            if (is_cut[label]) {
                double area = 0;
                for (int64_t i = 0; i < n; i++) {
                    const Point *after = ring + (i + 1 < n ? i + 1 : 0);
                    area += ring[i].at[0] * after->at[1] - after->at[0] * ring[i].at[1];
                }
                if (!(fabs(area / 2) > SMALLEST_AREA))
                    continue;
            }
            memcpy(points + total, ring, (size_t)n * sizeof(Point));
            total += n;
            lengths[rings++] = n;
            counts[label]++;
        }
        for (int corner = 0; at_corner && corner < 4; corner++) {
            const double x = window[corner / 2 * 2], y = window[corner % 2 * 2 + 1];
            const double at_x = corner / 2 ? x - NUDGE : x + NUDGE, at_y = corner % 2 ? y - NUDGE : y + NUDGE;
            const Point *ring = first;
            int turns = 0;
            for (int64_t r = 0; r < in.counts[label]; ring += length[r++])
                turns += winding(ring, length[r], at_x, at_y);
            if (turns > 0) {
                box[0] = less(box[0], x), box[1] = less(box[1], y);
                box[2] = more(box[2], x), box[3] = more(box[3], y);
            }
        }
        memcpy(boxes + 4 * label, box, sizeof box);
        length += in.counts[label];
    }
    written[0] = total;
    written[1] = rings;
}

/* ---- raster ---- */

/* Add to ``sums``, rows of width + 2 cells, what one edge adds to its cells. Coordinates are those of the window. */
static void add_edge(Point start, Point stop, int64_t stride, double *sums)
{
    if (start.at[1] == stop.at[1])
        return;
    const int goes_up = start.at[1] > stop.at[1];
    const Point upper = goes_up ? stop : start, lower = goes_up ? start : stop;
    const double slope = (lower.at[0] - upper.at[0]) / (lower.at[1] - upper.at[1]);
    const double most = more(upper.at[0], lower.at[0]);
    const int64_t first_row = down(upper.at[1]), end_row = up(lower.at[1]);
    int64_t row = first_row;
    do {
        const double top = more(upper.at[1], (double)row), bottom = less(lower.at[1], (double)(row + 1));
        const double x_top = less(more(upper.at[0] + (top - upper.at[1]) * slope, 0), most);
        const double x_bottom = less(more(upper.at[0] + (bottom - upper.at[1]) * slope, 0), most);
        const double height = goes_up ? bottom - top : top - bottom;
        const double left = less(x_top, x_bottom), right = more(x_top, x_bottom), across = right - left;
        const int64_t end_column = up(right);
        int64_t column = down(left);
        do {
            const double inner_left = more(left, (double)column), inner_right = less(right, (double)(column + 1));
            const double part = (across > 0 ? (inner_right - inner_left) / across : 1) * height;
            const double to_left = part * ((inner_left + inner_right) / 2 - (double)column);
            double *cell = sums + row * stride + column;
            cell[0] += part - to_left;
            cell[1] += to_left;
        } while (++column < end_column);
    } while (++row < end_row);
}

/* The part of a raster that is wanted, in pixels. */
typedef struct {
    int64_t top, bottom, left, right;
} Part;

/* ``scaled`` and ``sums`` have room for the points of a label, and for (width + 2) * height cells. */
static void raster_rings(Rings in, int64_t width, int64_t height, const Part *parts, Point *scaled, double *sums,
                         uint8_t *out)
{
    const int64_t *length = in.lengths;
    const double sides[2] = {(double)width, (double)height};
    double *const first_sum = sums;
    for (Py_ssize_t label = 0; label < in.labels; label++) {
        const Part part = parts[label];
        double low[2] = {INFINITY, INFINITY}, high[2] = {0, 0};
        int64_t count = 0;
        for (int64_t r = 0; r < in.counts[label]; r++)
            count += length[r];
        for (int64_t i = 0; i < count; i++) {
            for (int k = 0; k < 2; k++) {
                const double value = less(more(in.points[i].at[k] * sides[k], 0), sides[k]);
                scaled[i].at[k] = value;
                low[k] = less(low[k], value);
                high[k] = more(high[k], value);
            }
        }
        in.points += count;
        if (count) {
            const int64_t left = down(low[0]), top = down(low[1]);
            const int64_t w = up(high[0]) > left ? up(high[0]) - left : 1, h = up(high[1]) > top ? up(high[1]) - top : 1;
            const int64_t stride = w + 2; /* an edge on the right border begins in a column beyond it */
            memset(sums, 0, (size_t)(stride * h) * sizeof(double));
            for (int64_t i = 0; i < count; i++)
                scaled[i].at[0] -= (double)left, scaled[i].at[1] -= (double)top;
            const Point *ring = scaled;
            for (int64_t r = 0; r < in.counts[label]; ring += length[r++])
                for (int64_t i = 0; i < length[r]; i++)
                    add_edge(ring[i], ring[i + 1 < length[r] ? i + 1 : 0], stride, sums);
            double share = 0;
            for (int64_t y = top; y < top + h && y < part.bottom; y++) {
                for (int64_t x = left; x < left + stride; x++) {
                    share += *sums++;
                    if (y >= part.top && x >= part.left && x < part.right && x < left + w)
                        out[(y - part.top) * (part.right - part.left) + x - part.left] =
                            (uint8_t)(less(more(share, 0), 1) * 255 + 0.5);
                }
            }
            sums = first_sum;
        }
        length += in.counts[label];
        out += (part.bottom - part.top) * (part.right - part.left);
    }
}

/* ---- Python ---- */

/* Check that rings fit together; return the largest number of points of a label, -1 with an error. ``size``: of a point. */
static int64_t check_rings(const Py_buffer *points, Py_ssize_t size, const Py_buffer *lengths, const Py_buffer *counts,
                           Rings *rings)
{
    const Py_ssize_t total = points->len / size, count = lengths->len / 8;
    int64_t at_point = 0, at_ring = 0, most = 0;
    *rings = (Rings){points->buf, lengths->buf, counts->buf, counts->len / 8};
    for (Py_ssize_t label = 0; label < rings->labels; label++) {
        const int64_t before = at_point;
        for (int64_t r = 0; r < rings->counts[label]; r++, at_ring++) {
            if (at_ring >= count || rings->lengths[at_ring] < 1 || rings->lengths[at_ring] > total - at_point)
                goto wrong;
            at_point += rings->lengths[at_ring];
        }
        most = at_point - before > most ? at_point - before : most;
    }
    if (at_point == total && at_ring == count)
        return most;
wrong:
    PyErr_SetString(PyExc_ValueError, "points are [P, 2], lengths int64 [R] and counts int64 [n] that add up");
    return -1;
}

static PyObject *take(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer points, lengths, counts, numbers;
    if (!PyArg_ParseTuple(args, "y*y*y*y*", &points, &lengths, &counts, &numbers))
        return NULL;
    Rings rings;
    PyObject *out[3] = {NULL, NULL, NULL};
    const Py_ssize_t size = 2 * points.itemsize, chosen = numbers.len / 8;
    if (check_rings(&points, size, &lengths, &counts, &rings) >= 0) {
        const int64_t *number = numbers.buf;
        for (Py_ssize_t i = 0; i < chosen && !PyErr_Occurred(); i++)
            if (number[i] < 0 || number[i] >= rings.labels)
                PyErr_SetString(PyExc_IndexError, "there is no label of that number");
        if (!PyErr_Occurred() && !take_rings(points.buf, size, rings, number, chosen, out) && !PyErr_Occurred())
            PyErr_NoMemory();
    }
    PyBuffer_Release(&points);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&counts);
    PyBuffer_Release(&numbers);
    if (!PyErr_Occurred())
        return Py_BuildValue("NNN", out[0], out[1], out[2]);
    for (int i = 0; i < 3; i++)
        Py_XDECREF(out[i]);
    return NULL;
}

static PyObject *cut(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer points, lengths, counts, factors, offsets, out_points, out_lengths, out_counts, is_cut, boxes;
    double window[4];
    int turned;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*p(dddd)w*w*w*w*w*", &points, &lengths, &counts, &factors, &offsets, &turned,
                          window, window + 1, window + 2, window + 3, &out_points, &out_lengths, &out_counts, &is_cut, &boxes))
        return NULL;
    Rings rings;
    int64_t written[2] = {-1, -1};
    const int is_double = points.itemsize == sizeof(double);
    const Py_ssize_t size = is_double ? sizeof(Point) : sizeof(Point) / 2;
    const int64_t most = check_rings(&points, size, &lengths, &counts, &rings);
    if (most >= 0 && (factors.len != 2 * counts.len || offsets.len != factors.len ||
                      out_points.len / (Py_ssize_t)sizeof(Point) < MOST_FACTOR * (points.len / size) || out_lengths.len < lengths.len ||
                      out_counts.len < counts.len || is_cut.len < rings.labels || boxes.len < 4 * counts.len)) {
        PyErr_SetString(PyExc_ValueError, "factors and offsets are float64 [n, 2], and no output may be too small");
    } else if (most >= 0) {
        const Move move = {factors.buf, offsets.buf, turned, is_double};
        Point *spare = PyMem_RawMalloc((size_t)((2 * MOST_FACTOR + 1) * most + 1) * sizeof(Point));
        if (spare) {
            Py_BEGIN_ALLOW_THREADS
            cut_rings(rings, &move, window, spare, most, out_points.buf, out_lengths.buf, out_counts.buf, is_cut.buf,
                      boxes.buf, written);
            Py_END_ALLOW_THREADS
            PyMem_RawFree(spare);
        } else {
            PyErr_NoMemory();
        }
    }
    PyBuffer_Release(&points);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&counts);
    PyBuffer_Release(&factors);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&out_points);
    PyBuffer_Release(&out_lengths);
    PyBuffer_Release(&out_counts);
    PyBuffer_Release(&is_cut);
    PyBuffer_Release(&boxes);
    return PyErr_Occurred() ? NULL : Py_BuildValue("LL", (long long)written[0], (long long)written[1]);
}

static PyObject *raster(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer points, lengths, counts, windows, out;
    long height, width;
    if (!PyArg_ParseTuple(args, "y*y*y*(ll)y*w*", &points, &lengths, &counts, &height, &width, &windows, &out))
        return NULL;
    Rings rings;
    const int64_t most = check_rings(&points, sizeof(Point), &lengths, &counts, &rings);
    const Part *parts = windows.buf;
    int64_t left_over = out.len;
    int fits = height > 0 && width > 0 && height <= LARGEST_SIDE && width <= LARGEST_SIDE &&
               windows.len / (Py_ssize_t)sizeof(Part) >= counts.len / 8;
    for (Py_ssize_t label = 0; fits && label < counts.len / 8; label++) {
        const Part part = parts[label];
        fits = 0 <= part.top && part.top <= part.bottom && part.bottom <= height && 0 <= part.left &&
               part.left <= part.right && part.right <= width;
        left_over -= fits ? (part.bottom - part.top) * (part.right - part.left) : 0;
        fits = fits && left_over >= 0;
    }
    if (most >= 0 && !fits) {
        PyErr_SetString(PyExc_ValueError, "windows are int64 [n, 4] within the raster, and the output has room for them");
    } else if (most >= 0) {
        Point *scaled = PyMem_RawMalloc((size_t)(most + 1) * sizeof(Point));
        double *sums = PyMem_RawMalloc(((size_t)width + 2) * (size_t)height * sizeof(double) + sizeof(double));
        if (scaled && sums) {
            Py_BEGIN_ALLOW_THREADS
            raster_rings(rings, width, height, parts, scaled, sums, out.buf);
            Py_END_ALLOW_THREADS
        } else {
            PyErr_NoMemory();
        }
        PyMem_RawFree(scaled);
        PyMem_RawFree(sums);
    }
    PyBuffer_Release(&points);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&counts);
    PyBuffer_Release(&windows);
    PyBuffer_Release(&out);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"take", take, METH_VARARGS, "take(points, lengths, counts, numbers) -> those of the labels of these numbers, as bytes"},
    {"cut", cut, METH_VARARGS, "cut(points, lengths, counts, factors, offsets, turned, window, *outputs) -> numbers of points and rings that are left"},
    {"raster", raster, METH_VARARGS, "raster(points, lengths, counts, (height, width), windows, out)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_rings", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rings(void)
{
    return new_module(&definition, VERSION);
}
