/* SPDX-License-Identifier: Apache-2.0
 *
 * How a client comes by a handle.
 *
 * Keys speak of slots: gpu3 is the fourth slot even when gpu1 is `gone` and the driver's index of
 * what sits in it is 2.
 */
#include "double.h"

static struct nvmlDevice_st handles[MAX_GPUS][MAX_MIGS + 1]; /* the last of a row: the GPU itself */

nvmlDevice_t mig_handle(int gpu, int mig)
{
    struct nvmlDevice_st *handle = &handles[gpu][mig == NONE ? MAX_MIGS : mig];
    handle->gpu = gpu;
    handle->mig = mig;
    return handle;
}

nvmlDevice_t gpu_handle(int gpu)
{
    return mig_handle(gpu, NONE);
}

bool is_handle(nvmlDevice_t device)
{
    if (device < handles[0] || (void *)device >= (void *)(handles + MAX_GPUS))
        return false;
    if (device->mig == NONE)
        return device == &handles[device->gpu][MAX_MIGS];
    return text_of(device, "uuid") != NULL; /* a MIG device taken apart: its handle is invalid */
}

bool is_gone(nvmlDevice_t device)
{
    return number_or(text_at(device->gpu, NONE, "gone"), 0) != 0;
}

static int slots(void)
{
    unsigned long long number = number_or(text_at(NONE, NONE, "devices"), 0);
    return number < MAX_GPUS ? (int)number : MAX_GPUS;
}

int gpu_count(void)
{
    int count = 0;
    for (int gpu = 0; gpu < slots(); gpu++)
        count += !is_gone(gpu_handle(gpu));
    return count;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    nvmlReturn_t status = begin_system(__func__);
    FAIL_IF(!count, NVML_ERROR_INVALID_ARGUMENT);
    if (status == NVML_SUCCESS)
        *count = (unsigned int)gpu_count();
    return end(status);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    nvmlReturn_t status = begin_system(__func__);
    nvmlDevice_t found = NULL;
    for (int gpu = 0; status == NVML_SUCCESS && gpu < slots() && !found; gpu++)
        if (!is_gone(gpu_handle(gpu)) && index-- == 0)
            found = gpu_handle(gpu);
    FAIL_IF(!device || !found, NVML_ERROR_INVALID_ARGUMENT);
    if (status == NVML_SUCCESS)
        status = told_to_fail(__func__, found);
    if (status == NVML_SUCCESS)
        *device = found;
    return end(status);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    nvmlReturn_t status = begin(__func__, device);
    FAIL_IF(!index, NVML_ERROR_INVALID_ARGUMENT);
    if (status == NVML_SUCCESS && device->mig != NONE)
        *index = (unsigned int)device->mig;
    else if (status == NVML_SUCCESS) {
        *index = 0;
        for (int gpu = 0; gpu < device->gpu; gpu++)
            *index += !is_gone(gpu_handle(gpu));
    }
    return end(status);
}
