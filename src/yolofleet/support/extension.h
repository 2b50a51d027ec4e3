/* What the extensions in C share: variants of functions for several processors, and the making of a module.

   A file that defines USES_SHUFFLES before it includes this one gets SHUFFLES where the compiler has the instructions. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* The loader takes the variant with the widest vectors that the processor has. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDE
#endif
#if defined(USES_SHUFFLES) && defined(__x86_64__) && defined(__GNUC__)
#define SHUFFLES __attribute__((target("ssse3"))) /* in every 64-bit processor since 2006 (Intel) and 2011 (AMD) */
#include <tmmintrin.h>
#endif

static PyObject *new_module(struct PyModuleDef *definition, int version)
{
#ifdef SHUFFLES
    if (!__builtin_cpu_supports("ssse3")) {
        PyErr_SetString(PyExc_ImportError, "this processor has no SSSE3");
        return NULL;
    }
#endif
    PyObject *module = PyModule_Create(definition);
    if (module && PyModule_AddIntConstant(module, "VERSION", version) < 0)
        Py_CLEAR(module);
    return module;
}
