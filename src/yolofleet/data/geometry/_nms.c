/* Suppression of data/geometry/nms.py for one image on a CPU. nms.py has the same in torch; both keep the same rows,
   because every operation rounds by itself (-ffp-contract=off) and in the same order. */

#include "../../support/extension.h"

/* VERSION changes with every change of what the function takes or gives; nms.py uses no other one. */
enum { VERSION = 1, CHUNK = 64 };

typedef struct {
    float *x1, *y1, *x2, *y2, *area;
    int32_t *group;
} Kept;

/* Whether one of the kept boxes from ``from`` to ``to`` has the group of a box and overlaps it by more than ``iou``. */
WIDE static int is_suppressed(const Kept *kept, int from, int to, const float *box, float area, int32_t group, float iou)
{
    const float *restrict x1 = kept->x1, *restrict y1 = kept->y1, *restrict x2 = kept->x2, *restrict y2 = kept->y2;
    const float *restrict areas = kept->area;
    const int32_t *restrict groups = kept->group;
    const float left = box[0], top = box[1], right = box[2], bottom = box[3];
    int found = 0;
    for (int k = from; k < to; k++) {
        const float low_x = x1[k] > left ? x1[k] : left, high_x = x2[k] < right ? x2[k] : right;
        const float low_y = y1[k] > top ? y1[k] : top, high_y = y2[k] < bottom ? y2[k] : bottom;
        const float w = high_x - low_x, h = high_y - low_y;
        const float shared = (w > 0 ? w : 0) * (h > 0 ? h : 0);
        found |= (shared / (areas[k] + area - shared) > iou) & (groups[k] == group);
    }
    return found;
}

/* Sort rows by score, highest first; of equal scores the earlier row comes first. ``keys`` and ``rows`` have room for
   2 * n numbers each; the result is rows[0 .. n - 1]. A radix sort: 11 bits of the numbers at a time. */
static void sort_rows(const float *scores, int n, uint32_t *keys, int32_t *rows)
{
    uint32_t *keys_from = keys, *keys_to = keys + n;
    int32_t *rows_from = rows, *rows_to = rows + n;
    for (int i = 0; i < n; i++) {
        const float score = scores[i] + 0.0f; /* -0 becomes 0 */
        uint32_t bits;
        memcpy(&bits, &score, 4);
        keys_from[i] = bits >> 31 ? bits : ~(bits | 1u << 31); /* the higher the score, the lower the key */
        rows_from[i] = i;
    }
    for (int shift = 0; shift < 33; shift += 11) {
        int32_t places[1 << 11] = {0};
        for (int i = 0; i < n; i++)
            places[keys_from[i] >> shift & 2047]++;
        for (int32_t digit = 0, sum = 0; digit < 2048; digit++) {
            const int32_t count = places[digit];
            places[digit] = sum;
            sum += count;
        }
        for (int i = 0; i < n; i++) {
            const int32_t place = places[keys_from[i] >> shift & 2047]++;
            keys_to[place] = keys_from[i];
            rows_to[place] = rows_from[i];
        }
        uint32_t *const sorted_keys = keys_to;
        int32_t *const sorted_rows = rows_to;
        keys_to = keys_from, rows_to = rows_from;
        keys_from = sorted_keys, rows_from = sorted_rows;
    }
    memcpy(rows, rows_from, (size_t)n * sizeof(int32_t)); /* three passes end in the second half */
}

static int suppress_rows(const float *boxes, const int32_t *groups, const int32_t *order, int rows, float iou, int limit,
                         const Kept *kept, int64_t *out)
{
    int count = 0;
    for (int i = 0; i < rows && count < limit; i++) {
        const float *box = boxes + 4 * (Py_ssize_t)order[i];
        const int32_t group = groups[order[i]];
        const float area = (box[2] - box[0]) * (box[3] - box[1]);
        int found = 0;
        for (int k = 0; k < count && !found; k += CHUNK)
            found = is_suppressed(kept, k, k + CHUNK < count ? k + CHUNK : count, box, area, group, iou);
        if (found)
            continue;
        kept->x1[count] = box[0], kept->y1[count] = box[1], kept->x2[count] = box[2], kept->y2[count] = box[3];
        kept->area[count] = area, kept->group[count] = group;
        out[count++] = order[i];
    }
    return count;
}

static PyObject *suppress(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer boxes, scores, groups, out;
    float iou;
    if (!PyArg_ParseTuple(args, "y*y*y*fw*", &boxes, &scores, &groups, &iou, &out))
        return NULL;
    const Py_ssize_t rows = scores.len / 4, limit = out.len / 8;
    int count = -1;
    if (scores.len % 4 || boxes.len != 16 * rows || groups.len != 4 * rows || limit > rows || rows > INT32_MAX / 2) {
        PyErr_SetString(PyExc_ValueError, "boxes are float32 [M, 4], scores float32 [M], groups int32 [M], "
                                          "the output int64 [at most M]");
    } else {
        const size_t n = (size_t)rows, most = (size_t)limit;
        uint32_t *keys = PyMem_RawMalloc((4 * n + 6 * most + 1) * 4);
        if (keys) {
            int32_t *order = (int32_t *)(keys + 2 * n);
            float *numbers = (float *)(keys + 4 * n);
            const Kept kept = {numbers, numbers + most, numbers + 2 * most, numbers + 3 * most, numbers + 4 * most,
                               (int32_t *)(numbers + 5 * most)};
            Py_BEGIN_ALLOW_THREADS
            sort_rows(scores.buf, (int)rows, keys, order);
            count = suppress_rows(boxes.buf, groups.buf, order, (int)rows, iou, (int)limit, &kept, out.buf);
            Py_END_ALLOW_THREADS
            PyMem_RawFree(keys);
        } else {
            PyErr_NoMemory();
        }
    }
    PyBuffer_Release(&boxes);
    PyBuffer_Release(&scores);
    PyBuffer_Release(&groups);
    PyBuffer_Release(&out);
    return count < 0 ? NULL : PyLong_FromLong(count);
}

static PyMethodDef functions[] = {
    {"suppress", suppress, METH_VARARGS, "suppress(boxes, scores, groups, iou, out) -> number of rows kept"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_nms", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__nms(void)
{
    return new_module(&definition, VERSION);
}
