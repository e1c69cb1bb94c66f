/* SPDX-License-Identifier: Apache-2.0
 *
 * What surrounds every call: the count, the rules of the control file (crash, hang, error), the
 * check of the handle, the lock. Whether the library is initialised, and what is asked of it alone.
 */
#include "double.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned int uses; /* nvmlInit less nvmlShutdown */
static unsigned long long loaded; /* the key `reload` when the library was initialised */
static int held = -1; /* locked while the library is in use: README.md, "held" */

static int open_beside(const char *suffix, int flags)
{
    char path[4096];
    if (!control_path())
        return -1;
    snprintf(path, sizeof path, "%s.%s", control_path(), suffix);
    return open(path, flags | O_CREAT | O_CLOEXEC, 0666);
}

/* A line for each call of any process, whole by O_APPEND. */
static void note(const char *function)
{
    int file = open_beside("calls", O_WRONLY | O_APPEND);
    if (file < 0)
        return;
    dprintf(file, "%s\n", function);
    close(file);
}

/* Neither with the lock, so that other calls go on. */
static void suffer(const char *function, nvmlDevice_t device)
{
    int signal = (int)number_or(rule_for("crash", function, device), 0);
    if (signal) {
        struct sigaction plain = {.sa_handler = SIG_DFL};
        sigaction(signal, &plain, NULL);
        pthread_mutex_unlock(&lock);
        raise(signal);
        abort();
    }
    for (const char *manner; (manner = rule_for("hang", function, device)) != NULL;) {
        char copy[16];
        struct stat told = control_seen();
        snprintf(copy, sizeof copy, "%s", manner);
        pthread_mutex_unlock(&lock);
        hang(copy, &told); /* comes back when the control file changes */
        pthread_mutex_lock(&lock);
        control_refresh();
    }
}

nvmlReturn_t told_to_fail(const char *function, nvmlDevice_t device)
{
    return (nvmlReturn_t)number_or(rule_for("error", function, device), NVML_SUCCESS);
}

static void enter(const char *function)
{
    pthread_mutex_lock(&lock);
    note(function);
}

static nvmlReturn_t begin_without_init(const char *function)
{
    enter(function);
    if (!control_refresh())
        return NVML_ERROR_DRIVER_NOT_LOADED;
    suffer(function, NULL);
    return told_to_fail(function, NULL);
}

static nvmlReturn_t check_in(const char *function, nvmlDevice_t device)
{
    enter(function);
    if (!uses)
        return NVML_ERROR_UNINITIALIZED;
    control_refresh();
    suffer(function, device);
    if (number_or(text_at(NONE, NONE, "reload"), 0) != loaded)
        return NVML_ERROR_UNKNOWN;
    return told_to_fail(function, device);
}

/* A call without a device, or that finds it itself (and asks told_to_fail() about it then). */
nvmlReturn_t begin_system(const char *function)
{
    return check_in(function, NULL);
}

nvmlReturn_t begin(const char *function, nvmlDevice_t device)
{
    nvmlReturn_t status = check_in(function, device);
    FAIL_IF(!is_handle(device), NVML_ERROR_INVALID_ARGUMENT);
    FAIL_IF(is_gone(device), NVML_ERROR_GPU_IS_LOST);
    return status;
}

nvmlReturn_t end(nvmlReturn_t status)
{
    pthread_mutex_unlock(&lock);
    return status;
}

nvmlReturn_t copy_text(const char *text, char *buffer, unsigned int length)
{
    if (!text)
        return NVML_ERROR_NOT_SUPPORTED;
    if (*text == '!')
        return (nvmlReturn_t)strtoul(text + 1, NULL, 10);
    if (strlen(text) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return NVML_SUCCESS;
}

nvmlReturn_t wide_number(nvmlDevice_t device, const char *key, unsigned long long *value)
{
    return integer(text_of(device, "%s", key), value);
}

nvmlReturn_t number(nvmlDevice_t device, const char *key, unsigned int *value)
{
    unsigned long long wide;
    nvmlReturn_t status = wide_number(device, key, &wide);
    if (status == NVML_SUCCESS)
        *value = (unsigned int)wide;
    return status;
}

static nvmlReturn_t start(const char *function)
{
    nvmlReturn_t status = begin_without_init(function);
    if (status == NVML_SUCCESS && uses++ == 0) {
        loaded = number_or(text_at(NONE, NONE, "reload"), 0);
        held = open_beside("held", O_RDONLY);
        if (held >= 0)
            flock(held, LOCK_SH);
    }
    return end(status);
}

nvmlReturn_t nvmlInit_v2(void) { return start(__func__); }
nvmlReturn_t nvmlInitWithFlags(unsigned int flags) { return (void)flags, start(__func__); }

nvmlReturn_t nvmlShutdown(void)
{
    nvmlReturn_t status = begin_without_init(__func__);
    FAIL_IF(!uses, NVML_ERROR_UNINITIALIZED);
    if (status == NVML_SUCCESS && --uses == 0 && held >= 0) {
        close(held);
        held = -1;
    }
    return end(status);
}

SYSTEM_CALL(nvmlSystemGetDriverVersion, (char *version, unsigned int length),
            copy_text(text_at(NONE, NONE, "driver.version"), version, length))
SYSTEM_CALL(nvmlSystemGetNVMLVersion, (char *version, unsigned int length),
            copy_text(text_at(NONE, NONE, "nvml.version"), version, length))

/* The binding has words of its own for the errors that it knows. */
const char *nvmlErrorString(nvmlReturn_t result)
{
    return result == NVML_SUCCESS ? "The operation was successful" : "Unknown Error";
}
