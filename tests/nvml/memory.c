/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory in use, and its faults: ECC counts.
 *
 * The first nvmlDeviceGetMemoryInfo counts what the driver reserves as used, the second apart.
 */
#include "double.h"

struct memory {
    unsigned long long total, reserved, used, free;
};

static nvmlReturn_t read_memory(nvmlDevice_t device, struct memory *memory)
{
    nvmlReturn_t status = integer(text_of(device, "memory.total"), &memory->total);
    if (status == NVML_SUCCESS)
        status = integer(text_of(device, "memory.used"), &memory->used);
    memory->reserved = number_or(text_of(device, "memory.reserved"), 0);
    memory->free = memory->total - memory->reserved - memory->used;
    return status;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    struct memory now;
    nvmlReturn_t status = begin(__func__, device);
    if (status == NVML_SUCCESS)
        status = memory ? read_memory(device, &now) : NVML_ERROR_INVALID_ARGUMENT;
    if (status == NVML_SUCCESS) {
        memory->total = now.total;
        memory->used = now.used + now.reserved;
        memory->free = now.free;
    }
    return end(status);
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    struct memory now;
    nvmlReturn_t status = begin(__func__, device);
    FAIL_IF(memory->version != nvmlMemory_v2, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    if (status == NVML_SUCCESS)
        status = read_memory(device, &now);
    if (status == NVML_SUCCESS) {
        memory->total = now.total;
        memory->reserved = now.reserved;
        memory->used = now.used;
        memory->free = now.free;
    }
    return end(status);
}

static const char *const kinds[] = {"corrected", "uncorrected"};
static const char *const locations[] = {"l1", "l2", "dram", "register",
                                        "texture", "shm", "cbu", "sram"};

/* Since the driver was loaded (counter 0). */
nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, nvmlMemoryErrorType_t error,
                                             nvmlEccCounterType_t counter,
                                             nvmlMemoryLocation_t location,
                                             unsigned long long *count)
{
    nvmlReturn_t status = begin(__func__, device);
    FAIL_IF(error > 1 || counter || location >= COUNT(locations), NVML_ERROR_INVALID_ARGUMENT);
    if (status == NVML_SUCCESS)
        status = integer(text_format(device, "ecc.volatile.%s.%s", kinds[error],
                                     locations[location]), count);
    return end(status);
}
