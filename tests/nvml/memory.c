/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory in use, and its faults: ECC counts, remapped rows, retired pages.
 *
 * The first nvmlDeviceGetMemoryInfo counts what the driver reserves as used, the second apart.
 */
#include "double.h"

struct memory {
    unsigned long long total, reserved, used, free;
};

static nvmlReturn_t read_memory(nvmlDevice_t device, const char *key, struct memory *memory)
{
    nvmlReturn_t status = integer(text_format(device, "%s.total", key), &memory->total);
    if (status == NVML_SUCCESS)
        status = integer(text_format(device, "%s.used", key), &memory->used);
    memory->reserved = number_or(text_format(device, "%s.reserved", key), 0);
    memory->free = memory->total - memory->reserved - memory->used;
    return status;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    struct memory now;
    nvmlReturn_t status = begin(__func__, device);
    if (status == NVML_SUCCESS)
        status = memory ? read_memory(device, "memory", &now) : NVML_ERROR_INVALID_ARGUMENT;
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
        status = read_memory(device, "memory", &now);
    if (status == NVML_SUCCESS) {
        memory->total = now.total;
        memory->reserved = now.reserved;
        memory->used = now.used;
        memory->free = now.free;
    }
    return end(status);
}

nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *memory)
{
    struct memory now;
    nvmlReturn_t status = begin(__func__, device);
    if (status == NVML_SUCCESS)
        status = memory ? read_memory(device, "bar1", &now) : NVML_ERROR_INVALID_ARGUMENT;
    if (status == NVML_SUCCESS) {
        memory->bar1Total = now.total;
        memory->bar1Used = now.used;
        memory->bar1Free = now.free;
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

/* The total is a key of its own, or else the sum of the locations there are. */
static nvmlReturn_t ecc_total(nvmlDevice_t device, unsigned int error, unsigned int counter,
                              unsigned long long *total)
{
    unsigned long long one;
    nvmlReturn_t status = ecc(device, error, counter, "", total);
    if (status != NVML_ERROR_NOT_SUPPORTED)
        return status;
    *total = 0;
    for (int n = 0; n < LOCATIONS; n++) {
        nvmlReturn_t here = ecc(device, error, counter, locations[n], &one);
        if (here != NVML_SUCCESS && here != NVML_ERROR_NOT_SUPPORTED)
            return here;
        if (here == NVML_SUCCESS) {
            *total += one;
            status = NVML_SUCCESS;
        }
    }
    return status;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t error,
                                         nvmlEccCounterType_t counter, unsigned long long *count)
{
    nvmlReturn_t status = begin(__func__, device);
    return end(status == NVML_SUCCESS ? ecc_total(device, error, counter, count) : status);
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

nvmlReturn_t nvmlDeviceGetDetailedEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t error,
                                            nvmlEccCounterType_t counter,
                                            nvmlEccErrorCounts_t *counts)
{
    nvmlReturn_t status = begin(__func__, device);
    if (status == NVML_SUCCESS)
        status = ecc(device, error, counter, "dram", &counts->deviceMemory);
    if (status == NVML_SUCCESS) {
        unsigned long long *others[] = {&counts->l1Cache, &counts->l2Cache, &counts->registerFile};
        static const char *const names[] = {"l1", "l2", "register"};
        for (int n = 0; n < 3; n++)
            if (ecc(device, error, counter, names[n], others[n]) != NVML_SUCCESS)
                *others[n] = 0;
    }
    return end(status);
}

nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device, nvmlEccSramErrorStatus_t *status)
{
    nvmlReturn_t result = begin(__func__, device);
    if (result == NVML_SUCCESS && status->version != nvmlEccSramErrorStatus_v1)
        result = NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (result == NVML_SUCCESS && !text_of(device, "sram.volatile.corrected"))
        result = NVML_ERROR_NOT_SUPPORTED;
    if (result == NVML_SUCCESS) {
        struct { const char *key; unsigned long long *value; } parts[] = {
            {"sram.volatile.corrected", &status->volatileCor},
            {"sram.volatile.parity", &status->volatileUncParity},
            {"sram.volatile.secded", &status->volatileUncSecDed},
            {"sram.aggregate.corrected", &status->aggregateCor},
            {"sram.aggregate.parity", &status->aggregateUncParity},
            {"sram.aggregate.secded", &status->aggregateUncSecDed},
            {"sram.aggregate.l2", &status->aggregateUncBucketL2},
            {"sram.aggregate.sm", &status->aggregateUncBucketSm},
            {"sram.aggregate.pcie", &status->aggregateUncBucketPcie},
            {"sram.aggregate.microcontroller", &status->aggregateUncBucketMcu},
            {"sram.aggregate.other", &status->aggregateUncBucketOther},
        };
        for (size_t n = 0; n < sizeof parts / sizeof *parts; n++)
            *parts[n].value = number_or(text_of(device, parts[n].key), 0);
        status->bThresholdExceeded =
            (unsigned int)number_or(text_of(device, "sram.threshold_exceeded"), 0);
    }
    return end(result);
}

PAIR_CALL(nvmlDeviceGetEccMode, "ecc.mode", "ecc.mode.pending")
NUMBER_CALL(nvmlDeviceGetDefaultEccMode, "ecc.mode.default")
