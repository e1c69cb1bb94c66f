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

static const char *const error_types[] = {"corrected", "uncorrected"};
static const char *const counters[] = {"volatile", "aggregate"};
static const char *const locations[] = {"l1", "l2", "dram", "register",
                                        "texture", "shm", "cbu", "sram"};
enum { LOCATIONS = sizeof locations / sizeof *locations };

static nvmlReturn_t ecc(nvmlDevice_t device, unsigned int error, unsigned int counter,
                        const char *location, unsigned long long *count)
{
    if (error > 1 || counter > 1 || !count)
        return NVML_ERROR_INVALID_ARGUMENT;
    return integer(text_format(device, "ecc.%s.%s%s%s", counters[counter], error_types[error],
                               *location ? "." : "", location), count);
}

nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, nvmlMemoryErrorType_t error,
                                             nvmlEccCounterType_t counter,
                                             nvmlMemoryLocation_t location,
                                             unsigned long long *count)
{
    nvmlReturn_t status = begin(__func__, device);
    FAIL_IF((int)location >= LOCATIONS, NVML_ERROR_INVALID_ARGUMENT);
    return end(status == NVML_SUCCESS ? ecc(device, error, counter, locations[location], count)
                                      : status);
}
