/* SPDX-License-Identifier: Apache-2.0
 *
 * Events: XID errors and the like.
 *
 *     events=SEQUENCE:GPU:TYPE:DATA[:GI:CI],...
 *
 * An event set gets each event once, in order, that has a higher SEQUENCE than all there were when
 * the device was first registered with it. A wait sleeps until the control file changes.
 */
#include "double.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <time.h>
#include <unistd.h>

struct nvmlEventSet_st {
    unsigned long long types[MAX_GPUS];
    unsigned long long seen[MAX_GPUS]; /* the highest sequence delivered, or not wanted */
};

struct event {
    unsigned long long sequence, gpu, type, data, gi, ci;
};

static const char *next_event(const char *text, struct event *event)
{
    char *rest = (char *)text;
    unsigned long long *parts[] = {&event->sequence, &event->gpu, &event->type, &event->data,
                                   &event->gi, &event->ci};
    event->gi = event->ci = ~0U;
    for (size_t n = 0; n < sizeof parts / sizeof *parts; n++) {
        *parts[n] = strtoull(rest, &rest, 0);
        if (*rest != ':')
            break;
        rest++;
    }
    return *rest == ',' ? rest + 1 : NULL;
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    nvmlReturn_t status = begin_system(__func__);
    FAIL_IF(!set, NVML_ERROR_INVALID_ARGUMENT);
    if (status == NVML_SUCCESS)
        *set = calloc(1, sizeof **set);
    return end(status);
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    nvmlReturn_t status = begin_system(__func__);
    if (status == NVML_SUCCESS)
        free(set);
    return end(status);
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types,
                                      nvmlEventSet_t set)
{
    nvmlReturn_t status = begin(__func__, device);
    FAIL_IF(!set, NVML_ERROR_INVALID_ARGUMENT);
    FAIL_IF(device->mig != NONE, NVML_ERROR_NOT_SUPPORTED);
    FAIL_IF(types & ~number_or(text_of(device, "events.supported"), 0), NVML_ERROR_NOT_SUPPORTED);
    if (status == NVML_SUCCESS) {
        const char *text = text_at(NONE, NONE, "events");
        for (struct event event; text && !set->types[device->gpu];) {
            text = next_event(text, &event);
            if (event.sequence > set->seen[device->gpu])
                set->seen[device->gpu] = event.sequence;
        }
        set->types[device->gpu] |= types;
    }
    return end(status);
}

static bool take_event(nvmlEventSet_t set, nvmlEventData_t *data)
{
    const char *text = text_at(NONE, NONE, "events");
    for (struct event event; text;) {
        text = next_event(text, &event);
        if (event.gpu >= MAX_GPUS || !(event.type & set->types[event.gpu]) ||
            event.sequence <= set->seen[event.gpu])
            continue;
        set->seen[event.gpu] = event.sequence;
        data->device = gpu_handle((int)event.gpu);
        data->eventType = event.type;
        data->eventData = event.data;
        data->gpuInstanceId = (unsigned int)event.gi;
        data->computeInstanceId = (unsigned int)event.ci;
        return true;
    }
    return false;
}

static long long monotonic_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (long long)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* The folder is watched, since the control file is replaced. */
static int watch_folder(void)
{
    char folder[PATH_MAX];
    int watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    snprintf(folder, sizeof folder, "%s", control_path());
    char *slash = strrchr(folder, '/');
    if (slash)
        *slash = '\0';
    inotify_add_watch(watch, slash ? folder : ".", IN_MOVED_TO | IN_CLOSE_WRITE | IN_ATTRIB);
    return watch;
}

static void wait_for_change(int watch, long long milliseconds)
{
    char drained[4096];
    struct pollfd ready = {watch, POLLIN, 0};
    poll(&ready, 1, milliseconds > 60000 ? 60000 : (int)milliseconds);
    while (read(watch, drained, sizeof drained) > 0)
        ;
}

static nvmlReturn_t wait_event(const char *function, nvmlEventSet_t set, nvmlEventData_t *data,
                               unsigned int timeout)
{
    long long until = monotonic_ms() + timeout;
    nvmlReturn_t status = begin_system(function);
    FAIL_IF(!set || !data, NVML_ERROR_INVALID_ARGUMENT);
    /* Who does not wait needs no watch: closing one waits for the kernel's RCU, 5 to 15 ms. */
    int watch = status == NVML_SUCCESS && timeout > 0 ? watch_folder() : -1;
    if (watch >= 0)
        control_refresh(); /* nothing may happen between a look and the watch */
    while (status == NVML_SUCCESS && !take_event(set, data)) {
        long long left = until - monotonic_ms();
        if (left <= 0) {
            status = NVML_ERROR_TIMEOUT;
            break;
        }
        end(status);
        wait_for_change(watch, left);
        status = begin_again(function);
    }
    if (watch >= 0)
        close(watch);
    return end(status);
}

CALL(nvmlEventSetWait, (nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout),
     wait_event(__func__, set, data, timeout))

CALL(nvmlEventSetWait_v2, (nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout),
     wait_event(__func__, set, data, timeout))
