/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls that fill lists in: processes, and the driver's buffer of samples.
 *
 *     processes=PID:TYPE:BYTES[:GI:CI],...      TYPE: C compute, G graphics, M compute by MPS
 *
 * processes.growth=N starts N more after each answer that there is too little room: a list that
 * grows between the call that asks for its size and the one that asks for it.
 *
 * The buffer is made of the same keys as the values of now: a sample at each whole `PERIOD`, the
 * youngest `KEPT` of them. samples.gpu=TIME:VALUE ... puts others in their place.
 */
#include "double.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FIRST_PHANTOM = 4194304 }; /* no process has a number from here on: PID_MAX_LIMIT */
enum { PERIOD = 166667, KEPT = 99 }; /* nvidia-smi -q -d UTILIZATION: 99 in 16.5 s */

enum layout { FIRST, SECOND, WIDE }; /* WIDE: what nvml.h of CUDA 12.2.0 called nvmlProcessInfo_t */

struct list {
    enum layout layout;
    void *entries;
    unsigned int room, found;
};

static void add(struct list *list, nvmlProcessDetail_v1_t one)
{
    unsigned int n = list->found++;
    if (n >= list->room)
        return;
    if (list->layout == FIRST)
        ((nvmlProcessInfo_v1_t *)list->entries)[n] =
            (nvmlProcessInfo_v1_t){one.pid, one.usedGpuMemory};
    else if (list->layout == SECOND)
        ((nvmlProcessInfo_v2_t *)list->entries)[n] = (nvmlProcessInfo_v2_t){
            one.pid, one.usedGpuMemory, one.gpuInstanceId, one.computeInstanceId};
    else
        ((nvmlProcessDetail_v1_t *)list->entries)[n] = one;
}

/* A MIG device shows its own; a GPU in MIG mode shows all of them, to root only. */
static nvmlReturn_t collect(nvmlDevice_t device, char type, struct list *list)
{
    static unsigned int grown[MAX_GPUS];
    const char *text = text_at(device->gpu, NONE, "processes");
    unsigned int gi = (unsigned int)number_or(text_of(device, "gi"), 0);
    unsigned int ci = (unsigned int)number_or(text_of(device, "ci"), 0);
    if (!text)
        return NVML_ERROR_NOT_SUPPORTED;
    if (device->mig == NONE && in_mig_mode(device) && geteuid() != 0)
        return NVML_ERROR_NO_PERMISSION;
    for (; text; text = strchr(text, ',') ? strchr(text, ',') + 1 : NULL) {
        nvmlProcessDetail_v1_t one = {.gpuInstanceId = ~0U, .computeInstanceId = ~0U};
        char kind;
        int parts = sscanf(text, "%u:%c:%llu:%u:%u", &one.pid, &kind, &one.usedGpuMemory,
                           &one.gpuInstanceId, &one.computeInstanceId);
        bool own = device->mig == NONE ||
                   (one.gpuInstanceId == gi && one.computeInstanceId == ci);
        if (parts >= 3 && own && kind == type) /* `none` is no process */
            add(list, one);
    }
    unsigned int growth =
        (unsigned int)number_or(text_at(device->gpu, NONE, "processes.growth"), 0);
    if (!growth)
        grown[device->gpu] = 0;
    for (unsigned int n = 0; n < grown[device->gpu] && type == 'C'; n++)
        add(list, (nvmlProcessDetail_v1_t){.pid = FIRST_PHANTOM + n, .usedGpuMemory = ~0U});
    if (list->found <= list->room)
        return NVML_SUCCESS;
    grown[device->gpu] += growth;
    return NVML_ERROR_INSUFFICIENT_SIZE;
}

static nvmlReturn_t answer(nvmlDevice_t device, char type, unsigned int *count, void *entries,
                           enum layout layout)
{
    struct list list = {layout, entries, *count, 0};
    if (layout == WIDE && !number_or(text_at(NONE, NONE, "processes.wide"), 0))
        list.layout = SECOND;
    nvmlReturn_t status = collect(device, type, &list);
    *count = list.found;
    return status;
}

#define LIST_CALL(call, info, type, layout)                                          \
    DEVICE_CALL(call, (nvmlDevice_t device, unsigned int *count, info *processes), \
                answer(device, type, count, processes, layout))

LIST_CALL(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t, 'C', FIRST)
LIST_CALL(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, 'C', SECOND)
LIST_CALL(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t, 'C', WIDE)
LIST_CALL(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t, 'G', FIRST)
LIST_CALL(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t, 'G', SECOND)
LIST_CALL(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t, 'G', WIDE)
LIST_CALL(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t, 'M', FIRST)
LIST_CALL(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, 'M', SECOND)
LIST_CALL(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t, 'M', WIDE)

nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, nvmlSamplingType_t type,
                                  unsigned long long since, nvmlValueType_t *value_type,
                                  unsigned int *count, nvmlSample_t *samples)
{
    nvmlReturn_t status = begin(__func__, device);
    FAIL_IF(type != NVML_GPU_UTILIZATION_SAMPLES || in_mig_mode(device), NVML_ERROR_NOT_SUPPORTED);
    const char *text = status == NVML_SUCCESS ? text_of(device, "utilization.gpu") : NULL;
    const char *given = text ? text_of(device, "samples.gpu") : NULL;
    FAIL_IF(!text, NVML_ERROR_NOT_SUPPORTED);
    unsigned int found = 0;
    long long period = now_us() / PERIOD - KEPT;
    for (unsigned int n = 0; status == NVML_SUCCESS && (given ? *given : n < KEPT); n++) {
        unsigned long long time, value;
        if (given) {
            char *rest;
            time = strtoull(given, &rest, 10);
            value = strtoull(rest + 1, &rest, 10);
            given = *rest ? rest + 1 : rest;
        } else {
            period++;
            time = (unsigned long long)(period * PERIOD);
            value = (unsigned long long)lround(real_at(text, period * PERIOD));
        }
        if (time <= since || (samples && found >= *count))
            continue;
        if (samples) /* else only the size is asked for */
            samples[found] = (nvmlSample_t){time, {.ullVal = (unsigned int)value}};
        found++;
    }
    *value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
    *count = found;
    FAIL_IF(!found, NVML_ERROR_NOT_FOUND);
    return end(status);
}
