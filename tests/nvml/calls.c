/* SPDX-License-Identifier: Apache-2.0
 *
 * What surrounds every call: the count, the rules of the control file (crash, hang, error), the check of the handle, the lock. And whether the library is initialised.
 */
#include "double.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned int uses; /* nvmlInit less nvmlShutdown */
static unsigned long long loaded; /* the key `reload` when the library was initialised */
static int held = -1; /* locked while the library is in use: README.md, "held" */

static const char *rule(char kind, const char *function, nvmlDevice_t device)
{
    bool known = is_handle(device);
    return rule_for(kind, function, known ? device->gpu : NONE, known ? device->mig : NONE);
}

/* Neither with the lock, so that other calls go on. */
static void suffer(const char *function, nvmlDevice_t device)
{
    const char *crash = rule('c', function, device);
    const char *manner = rule('h', function, device);
    int signal = (int)number_or(crash, 0);
    if (signal) {
        struct sigaction plain = {.sa_handler = SIG_DFL};
        sigaction(signal, &plain, NULL);
        pthread_mutex_unlock(&lock);
        raise(signal);
        abort();
    }
    while (manner) {
        char copy[16];
        struct stat told = control_seen();
        snprintf(copy, sizeof copy, "%s", manner);
        pthread_mutex_unlock(&lock);
        hang(copy, &told); /* comes back when the control file changes */
        pthread_mutex_lock(&lock);
        control_refresh();
        manner = rule('h', function, device);
    }
}

nvmlReturn_t told_to_fail(const char *function, nvmlDevice_t device)
{
    return (nvmlReturn_t)number_or(rule('e', function, device), NVML_SUCCESS);
}

nvmlReturn_t begin_without_init(const char *function)
{
    pthread_mutex_lock(&lock);
    count_call(function);
    if (!control_refresh())
        return NVML_ERROR_DRIVER_NOT_LOADED;
    suffer(function, NULL);
    return told_to_fail(function, NULL);
}

static nvmlReturn_t check_in(const char *function, nvmlDevice_t device)
{
    pthread_mutex_lock(&lock);
    count_call(function);
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
    if (status != NVML_SUCCESS)
        return status;
    if (!is_handle(device))
        return NVML_ERROR_INVALID_ARGUMENT;
    return is_gone(device) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

nvmlReturn_t end(nvmlReturn_t status)
{
    count_processor();
    pthread_mutex_unlock(&lock);
    return status;
}

nvmlReturn_t enter_library(void)
{
    char path[4096];
    if (uses++ == 0) {
        loaded = number_or(text_at(NONE, NONE, "reload"), 0);
        snprintf(path, sizeof path, "%s.held", control_path());
        held = open(path, O_RDONLY | O_CREAT | O_CLOEXEC, 0666);
        if (held >= 0)
            flock(held, LOCK_SH);
    }
    return NVML_SUCCESS;
}

nvmlReturn_t leave_library(void)
{
    if (!uses)
        return NVML_ERROR_UNINITIALIZED;
    if (--uses == 0 && held >= 0) {
        close(held);
        held = -1;
    }
    return NVML_SUCCESS;
}
