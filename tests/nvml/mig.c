/* SPDX-License-Identifier: Apache-2.0
 *
 * Multi-Instance GPU: gpuN.migM is the MIG device of index M on gpuN; it is there when it has a
 * `uuid`. Its keys `gi` and `ci` say which instances it is.
 */
#include "double.h"

struct nvmlGpuInstance_st {
    int gpu, mig; /* the first MIG device of the instance */
};
struct nvmlComputeInstance_st {
    int gpu, mig;
};

bool in_mig_mode(nvmlDevice_t device)
{
    return device->mig != NONE || number_or(text_at(device->gpu, NONE, "mig.mode"), 0) == 1;
}

static bool is_there(int gpu, int mig)
{
    return text_at(gpu, mig, "uuid") != NULL;
}

static unsigned int part(int gpu, int mig, const char *key)
{
    return (unsigned int)number_or(text_at(gpu, mig, key), 0);
}

int mig_by_instance(int gpu, unsigned int gpu_instance)
{
    for (int mig = 0; mig < MAX_MIGS; mig++)
        if (is_there(gpu, mig) && part(gpu, mig, "gi") == gpu_instance)
            return mig;
    return NONE;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *mode, unsigned int *pending)
{
    nvmlReturn_t status = begin(__func__, device);
    if (status == NVML_SUCCESS)
        status = copy_number(device, "mig.mode", mode);
    if (status == NVML_SUCCESS)
        status = copy_number(device, "mig.mode.pending", pending);
    return end(status);
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    nvmlReturn_t status = begin(__func__, device);
    FAIL_IF(!count, NVML_ERROR_INVALID_ARGUMENT);
    if (status == NVML_SUCCESS)
        *count = in_mig_mode(device) ? (unsigned int)number_or(text_of(device, "mig.max"), 0) : 0;
    return end(status);
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index,
                                                 nvmlDevice_t *mig)
{
    nvmlReturn_t status = begin(__func__, device);
    FAIL_IF(device->mig != NONE || !mig, NVML_ERROR_INVALID_ARGUMENT);
    FAIL_IF(!text_of(device, "mig.mode"), NVML_ERROR_NOT_SUPPORTED);
    FAIL_IF(index >= number_or(text_of(device, "mig.max"), 0), NVML_ERROR_INVALID_ARGUMENT);
    FAIL_IF(!in_mig_mode(device) || !is_there(device->gpu, (int)index), NVML_ERROR_NOT_FOUND);
    if (status == NVML_SUCCESS)
        *mig = mig_handle(device->gpu, (int)index);
    return end(status);
}

NUMBER_CALL(nvmlDeviceGetGpuInstanceId, "gi")
NUMBER_CALL(nvmlDeviceGetComputeInstanceId, "ci")
