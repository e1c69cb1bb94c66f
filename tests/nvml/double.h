/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the double share. Each exported function reads
 *
 *     nvmlReturn_t status = begin(__func__, device);      counts, waits, fails or hangs as told
 *     FAIL_IF(condition, NVML_ERROR_...);                 unless it failed already
 *     if (status == NVML_SUCCESS) status = ...;           the answer, from the control file
 *     return end(status);
 *
 * and the short ones are one call of an answer_* function, which does just that. All state is the
 * control file's, held under one lock between begin() and end(). README.md has the keys.
 */
#ifndef DOUBLE_H
#define DOUBLE_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>

#include "nvml_api.h"

enum { MAX_GPUS = 32, MAX_MIGS = 16, NONE = -1, ANY = -2 };

struct nvmlDevice_st { /* what a device handle points to; `mig` is NONE for a whole GPU */
    int gpu, mig;
};

/* control.c: the lines of the control file. A text is NULL where a key is missing or empty. */
bool control_refresh(void); /* reads the file again if it changed; false: there is none */
struct stat control_seen(void); /* the control file as it was when it was read */
bool same_state(const struct stat *one, const struct stat *other);
const char *control_path(void);
const char *text_at(int gpu, int mig, const char *key);
const char *text_of(nvmlDevice_t device, const char *key);
const char *text_format(nvmlDevice_t device, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

struct rule { /* error.CALL=, hang.CALL=, crash.CALL= */
    char kind;
    int gpu, mig;
    const char *pattern, *value;
};
const char *rule_for(char kind, const char *function, int gpu, int mig);

/* value.c: numbers that may change with time. Times are microseconds since 1970. */
long long now_us(void);
nvmlReturn_t integer(const char *text, unsigned long long *value);
double mean_between(const char *text, long long from, long long to);
unsigned long long number_or(const char *text, unsigned long long otherwise);
unsigned long long amount(const char *text, char **rest);

/* calls.c: what surrounds every call. */
nvmlReturn_t begin(const char *function, nvmlDevice_t device);
nvmlReturn_t begin_system(const char *function);
nvmlReturn_t begin_without_init(const char *function);
nvmlReturn_t end(nvmlReturn_t status);
nvmlReturn_t told_to_fail(const char *function, nvmlDevice_t device);
nvmlReturn_t enter_library(void);
nvmlReturn_t leave_library(void);

/* counters.c and hang.c */
void count_call(const char *function);
void count_processor(void);
void hang(const char *manner, const struct stat *before);

/* answer.c: whole calls that only hand out a key. */
nvmlReturn_t copy_text(const char *text, char *buffer, unsigned int length);
nvmlReturn_t copy_number(nvmlDevice_t device, const char *key, unsigned int *value);
nvmlReturn_t answer_text(const char *function, nvmlDevice_t device, const char *key, char *buffer,
                         unsigned int length);
nvmlReturn_t answer_number(const char *function, nvmlDevice_t device, const char *key,
                           unsigned int *value);
nvmlReturn_t answer_long(const char *function, nvmlDevice_t device, const char *key,
                         unsigned long long *value);
nvmlReturn_t answer_choice(const char *function, nvmlDevice_t device, const char *prefix,
                           const char *const *names, unsigned int count, unsigned int which,
                           unsigned int *value);

#define FAIL_IF(condition, error)                    \
    do {                                             \
        if (status == NVML_SUCCESS && (condition))   \
            status = error;                          \
    } while (0)

/* A call that is one answer, and those that only hand out a key. */
#define CALL(call, parameters, answer) nvmlReturn_t call parameters { return answer; }
#define NUMBER_CALL(call, key) \
    CALL(call, (nvmlDevice_t device, unsigned int *value), answer_number(__func__, device, key, value))
#define LONG_CALL(call, key)                                      \
    CALL(call, (nvmlDevice_t device, unsigned long long *value),  \
         answer_long(__func__, device, key, value))
#define TEXT_CALL(call, key)                                              \
    CALL(call, (nvmlDevice_t device, char *buffer, unsigned int length),  \
         answer_text(__func__, device, key, buffer, length))
#define COUNT(names) (unsigned int)(sizeof(names) / sizeof *(names))
#define CHOICE_CALL(call, kind, prefix, names)                            \
    CALL(call, (nvmlDevice_t device, kind which, unsigned int *value),    \
         answer_choice(__func__, device, prefix, names, COUNT(names), which, value))

/* devices.c and mig.c */
nvmlDevice_t gpu_handle(int gpu);
nvmlDevice_t mig_handle(int gpu, int mig);
bool is_handle(nvmlDevice_t device);
bool is_gone(nvmlDevice_t device);
int gpu_count(void);
bool in_mig_mode(nvmlDevice_t device);
int mig_by_instance(int gpu, unsigned int gpu_instance);

/* links.c and usage.c */
const char *link_text(nvmlDevice_t device, unsigned int link, const char *key);
nvmlReturn_t begin_busy(const char *function, nvmlDevice_t device);

#endif
