/* SPDX-License-Identifier: Apache-2.0
 *
 * Multi-Instance GPU: gpuN.migM is the MIG device of index M on gpuN; it is there when it has a
 * `uuid`. Its keys `gi` and `ci` say which instances it is; `profile` is their profile's number.
 */
#include "double.h"

#include <string.h>

struct nvmlGpuInstance_st {
    int gpu, mig; /* the first MIG device of the instance */
};
struct nvmlComputeInstance_st {
    int gpu, mig;
};

static struct nvmlGpuInstance_st gpu_instances[MAX_GPUS][MAX_MIGS];
static struct nvmlComputeInstance_st compute_instances[MAX_GPUS][MAX_MIGS];

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

PAIR_CALL(nvmlDeviceGetMigMode, "mig.mode", "mig.mode.pending")

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    nvmlReturn_t status = begin(__func__, device);
    FAIL_IF(!count, NVML_ERROR_INVALID_ARGUMENT);
    if (status == NVML_SUCCESS)
        *count = in_mig_mode(device) ? (unsigned int)number_or(text_of(device, "mig.max"), 0) : 0;
    return end(status);
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig)
{
    nvmlReturn_t status = begin(__func__, device);
    if (status == NVML_SUCCESS)
        *is_mig = device->mig != NONE;
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

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device)
{
    nvmlReturn_t status = begin(__func__, mig);
    FAIL_IF(mig->mig == NONE, NVML_ERROR_INVALID_ARGUMENT);
    if (status == NVML_SUCCESS)
        *device = gpu_handle(mig->gpu);
    return end(status);
}

NUMBER_CALL(nvmlDeviceGetGpuInstanceId, "gi")
NUMBER_CALL(nvmlDeviceGetComputeInstanceId, "ci")

static nvmlReturn_t answer_attributes(const char *function, nvmlDevice_t device,
                                      nvmlDeviceAttributes_t *attributes)
{
    nvmlReturn_t status = begin(function, device);
    FAIL_IF(!text_of(device, "attributes.multiprocessors"), NVML_ERROR_NOT_SUPPORTED);
    if (status == NVML_SUCCESS) {
        struct { const char *key; unsigned int *value; } parts[] = {
            {"attributes.multiprocessors", &attributes->multiprocessorCount},
            {"attributes.copy_engines", &attributes->sharedCopyEngineCount},
            {"attributes.decoders", &attributes->sharedDecoderCount},
            {"attributes.encoders", &attributes->sharedEncoderCount},
            {"attributes.jpegs", &attributes->sharedJpegCount},
            {"attributes.ofas", &attributes->sharedOfaCount},
            {"attributes.gpu_slices", &attributes->gpuInstanceSliceCount},
            {"attributes.compute_slices", &attributes->computeInstanceSliceCount},
        };
        for (size_t n = 0; n < sizeof parts / sizeof *parts; n++)
            *parts[n].value = (unsigned int)number_or(text_of(device, parts[n].key), 0);
        attributes->memorySizeMB = number_or(text_of(device, "memory.total"), 0) >> 20;
    }
    return end(status);
}

CALL(nvmlDeviceGetAttributes, (nvmlDevice_t device, nvmlDeviceAttributes_t *attributes),
     answer_attributes(__func__, device, attributes))

CALL(nvmlDeviceGetAttributes_v2, (nvmlDevice_t device, nvmlDeviceAttributes_t *attributes),
     answer_attributes(__func__, device, attributes))

nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned int mode, nvmlReturn_t *activation)
{
    nvmlReturn_t status = change_setting(__func__, device, "mig.mode.pending", mode);
    if (activation)
        *activation = status;
    return status;
}

static nvmlGpuInstance_t gpu_instance(int gpu, int mig)
{
    struct nvmlGpuInstance_st *instance = &gpu_instances[gpu][mig];
    instance->gpu = gpu;
    instance->mig = mig;
    return instance;
}

nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned int profile,
                                       nvmlGpuInstance_t *instances, unsigned int *count)
{
    nvmlReturn_t status = begin(__func__, device);
    FAIL_IF(!in_mig_mode(device), NVML_ERROR_NOT_SUPPORTED);
    FAIL_IF(!privileged(), NVML_ERROR_NO_PERMISSION);
    if (status == NVML_SUCCESS) {
        *count = 0;
        for (int mig = 0; mig < MAX_MIGS; mig++) {
            bool first = is_there(device->gpu, mig) &&
                         mig_by_instance(device->gpu, part(device->gpu, mig, "gi")) == mig;
            if (first && part(device->gpu, mig, "profile") == profile)
                instances[(*count)++] = gpu_instance(device->gpu, mig);
        }
    }
    return end(status);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id,
                                          nvmlGpuInstance_t *instance)
{
    nvmlReturn_t status = begin(__func__, device);
    int mig = status == NVML_SUCCESS ? mig_by_instance(device->gpu, id) : NONE;
    FAIL_IF(!in_mig_mode(device), NVML_ERROR_NOT_SUPPORTED);
    FAIL_IF(mig == NONE, NVML_ERROR_NOT_FOUND);
    if (status == NVML_SUCCESS)
        *instance = gpu_instance(device->gpu, mig);
    return end(status);
}

nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
    nvmlReturn_t status = begin_system(__func__);
    FAIL_IF(!is_there(instance->gpu, instance->mig), NVML_ERROR_INVALID_ARGUMENT);
    if (status == NVML_SUCCESS) {
        info->device = gpu_handle(instance->gpu);
        info->id = part(instance->gpu, instance->mig, "gi");
        info->profileId = part(instance->gpu, instance->mig, "profile");
        info->placement.start = part(instance->gpu, instance->mig, "placement.start");
        info->placement.size = part(instance->gpu, instance->mig, "placement.size");
    }
    return end(status);
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t instance, unsigned int id,
                                                   nvmlComputeInstance_t *compute)
{
    nvmlReturn_t status = begin_system(__func__);
    unsigned int gi = part(instance->gpu, instance->mig, "gi");
    if (status == NVML_SUCCESS)
        status = NVML_ERROR_NOT_FOUND;
    for (int mig = 0; status == NVML_ERROR_NOT_FOUND && mig < MAX_MIGS; mig++)
        if (is_there(instance->gpu, mig) && part(instance->gpu, mig, "gi") == gi &&
            part(instance->gpu, mig, "ci") == id) {
            struct nvmlComputeInstance_st *found = &compute_instances[instance->gpu][mig];
            *found = (struct nvmlComputeInstance_st){instance->gpu, mig};
            *compute = found;
            status = NVML_SUCCESS;
        }
    return end(status);
}

nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t compute,
                                           nvmlComputeInstanceInfo_t *info)
{
    nvmlReturn_t status = begin_system(__func__);
    if (status == NVML_SUCCESS) {
        memset(info, 0, sizeof *info);
        info->device = gpu_handle(compute->gpu);
        info->id = part(compute->gpu, compute->mig, "ci");
        info->gpuInstance = gpu_instance(
            compute->gpu, mig_by_instance(compute->gpu, part(compute->gpu, compute->mig, "gi")));
    }
    return end(status);
}
