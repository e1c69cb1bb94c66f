/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the double share. Each exported function is
 *
 *     nvmlReturn_t status = begin(__func__, device);      counts, waits, fails or hangs as told
 *     TRY(...);                                           the answer, unless it failed already
 *     return end(status);
 *
 * which DEVICE_CALL and SYSTEM_CALL write out. All state is the control file's, held under one lock
 * between begin() and end(). README.md has the keys.
 */
#ifndef DOUBLE_H
#define DOUBLE_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>

#include "nvml_api.h"

enum { MAX_GPUS = 32, MAX_MIGS = 16, NONE = -1 };

struct nvmlDevice_st { /* what a device handle points to; `mig` is NONE for a whole GPU */
    int gpu, mig;
};

/* control.c: the lines of the control file. A text is NULL where a key is missing or empty. */
bool control_refresh(void); /* reads the file again if it changed; false: there is none */
struct stat control_seen(void); /* the control file as it was when it was read */
bool same_state(const struct stat *one, const struct stat *other);
const char *control_path(void);
const char *text_at(int gpu, int mig, const char *key);
const char *text_of(nvmlDevice_t device, const char *key, ...)
    __attribute__((format(printf, 2, 3)));
const char *rule_for(const char *kind, const char *function, nvmlDevice_t device);

/* Numbers, which may change with time. Times are microseconds since 1970. */
long long now_us(void);
nvmlReturn_t integer(const char *text, unsigned long long *value);
double real_at(const char *text, long long when);
unsigned long long number_or(const char *text, unsigned long long otherwise);

/* calls.c: what surrounds every call, and what hands out a key. */
nvmlReturn_t begin(const char *function, nvmlDevice_t device);
nvmlReturn_t begin_system(const char *function);
nvmlReturn_t end(nvmlReturn_t status);
nvmlReturn_t told_to_fail(const char *function, nvmlDevice_t device);
nvmlReturn_t copy_text(const char *text, char *buffer, unsigned int length);
nvmlReturn_t number(nvmlDevice_t device, const char *key, unsigned int *value);
nvmlReturn_t wide_number(nvmlDevice_t device, const char *key, unsigned long long *value);

/* hang.c */
void hang(const char *manner, const struct stat *before);

#define TRY(answer)                 \
    do {                            \
        if (status == NVML_SUCCESS) \
            status = (answer);      \
    } while (0)
#define FAIL_IF(condition, error) TRY((condition) ? (error) : NVML_SUCCESS)
#define SYSTEM_CALL(call, parameters, answer)      \
    nvmlReturn_t call parameters                   \
    {                                              \
        nvmlReturn_t status = begin_system(__func__); \
        TRY(answer);                               \
        return end(status);                        \
    }
#define DEVICE_CALL(call, parameters, answer)         \
    nvmlReturn_t call parameters                      \
    {                                                 \
        nvmlReturn_t status = begin(__func__, device); \
        TRY(answer);                                  \
        return end(status);                           \
    }

/* devices.c */
nvmlDevice_t handle_of(int gpu, int mig);
bool is_handle(nvmlDevice_t device);
bool is_gone(nvmlDevice_t device);
bool in_mig_mode(nvmlDevice_t device);
int mig_by_instance(int gpu, unsigned int gpu_instance);

#endif
