/* SPDX-License-Identifier: Apache-2.0
 * A CUDA driver of one card, for the test of load.py: it checks what it is given, as cuda.h
 * declares it, and a kernel takes as long as its rounds say. FAKE_CUDA_FAIL names a call that
 * fails with 2 (out of memory); FAKE_CUDA_LOG is where each call is written down.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, INVALID_PTX = 218 };
static const uint64_t BASE = 0x7f0000000000;
static const int MULTIPROCESSORS = 132;
static size_t held;
static int context, module, kernel, current;

static int enter(const char *name)
{
    const char *log = getenv("FAKE_CUDA_LOG"), *fail = getenv("FAKE_CUDA_FAIL");
    FILE *out = log ? fopen(log, "a") : NULL;

    if (out) {
        fprintf(out, "%s\n", name);
        fclose(out);
    }
    return fail && !strcmp(fail, name) ? OUT_OF_MEMORY : 0;
}

#define ENTER() do { int failed = enter(__func__); if (failed) return failed; } while (0)

int cuInit(unsigned flags) { ENTER(); return flags ? INVALID_VALUE : 0; }

int cuDeviceGet(int *device, int ordinal)
{
    ENTER();
    *device = ordinal;
    return ordinal ? 101 : 0; /* CUDA_ERROR_INVALID_DEVICE */
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    ENTER();
    *value = attribute == 16 ? MULTIPROCESSORS : attribute == 75 ? 9 : 0;
    return device ? 101 : 0;
}

int cuDevicePrimaryCtxRetain(void **made, int device)
{
    ENTER();
    *made = &context;
    return device ? 101 : 0;
}

int cuCtxSetCurrent(void *made)
{
    ENTER();
    current = made == &context;
    return current ? 0 : INVALID_CONTEXT;
}

int cuModuleLoadDataEx(void **made, const char *text, unsigned count, int *options, void **values)
{
    ENTER();
    if (!current || count != 2 || options[0] != 5 || options[1] != 6)
        return INVALID_VALUE;
    if (getenv("FAKE_CUDA_REFUSES_PTX")) {
        snprintf(values[0], (size_t)values[1], "ptxas error: line 7, what is this");
        return INVALID_PTX;
    }
    *made = &module;
    return strstr(text, ".visible .entry spin(") ? 0 : INVALID_PTX;
}

int cuModuleGetFunction(void **found, void *from, const char *name)
{
    ENTER();
    *found = &kernel;
    return from == &module && !strcmp(name, "spin") ? 0 : 500; /* NOT_FOUND */
}

int cuMemAlloc_v2(uint64_t *at, size_t bytes)
{
    ENTER();
    *at = BASE;
    held = bytes;
    return 0;
}

int cuMemsetD8_v2(uint64_t at, unsigned char value, size_t bytes)
{
    ENTER();
    return at == BASE && !value && bytes <= held ? 0 : INVALID_VALUE;
}

int cuLaunchKernel(void *what, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **parameters, void **extra)
{
    uint64_t out;
    unsigned rounds;

    ENTER();
    memcpy(&out, parameters[0], sizeof out);
    memcpy(&rounds, parameters[1], sizeof rounds);
    if (what != &kernel || gx != 8u * MULTIPROCESSORS || gy != 1 || gz != 1 || bx != 256 ||
        by != 1 || bz != 1 || shared || stream || extra || out != BASE || !rounds ||
        4ul * gx * bx > held)
        return INVALID_VALUE;
    nanosleep(&(struct timespec){ .tv_nsec = rounds < 100000000 ? (long)rounds * 5 : 500000000 },
              NULL);
    return 0;
}

int cuCtxSynchronize(void) { ENTER(); return 0; }
int cuMemFree_v2(uint64_t at) { ENTER(); return at == BASE ? 0 : INVALID_VALUE; }
int cuModuleUnload(void *which) { ENTER(); return which == &module ? 0 : INVALID_VALUE; }
int cuDevicePrimaryCtxRelease_v2(int device) { ENTER(); return device; }

int cuGetErrorString(int error, const char **text)
{
    *text = error == OUT_OF_MEMORY ? "out of memory" : "something else";
    return 0;
}
