/* SPDX-License-Identifier: Apache-2.0
 *
 * What a card tells of itself: calls that hand out a key, and those of a few keys.
 */
#include "double.h"

#define NUMBER_CALL(call, key) \
    DEVICE_CALL(call, (nvmlDevice_t device, unsigned int *value), number(device, key, value))
#define WIDE_CALL(call, key)                                            \
    DEVICE_CALL(call, (nvmlDevice_t device, unsigned long long *value), \
                wide_number(device, key, value))
#define TEXT_CALL(call, key)                                                    \
    DEVICE_CALL(call, (nvmlDevice_t device, char *buffer, unsigned int length), \
                copy_text(text_of(device, key), buffer, length))
#define COUNT(names) (sizeof(names) / sizeof *(names))

TEXT_CALL(nvmlDeviceGetName, "name")
TEXT_CALL(nvmlDeviceGetUUID, "uuid")
NUMBER_CALL(nvmlDeviceGetMinorNumber, "minor")
NUMBER_CALL(nvmlDeviceGetNumaNodeId, "numa_node_id")
NUMBER_CALL(nvmlDeviceGetGpuInstanceId, "gi")
NUMBER_CALL(nvmlDeviceGetComputeInstanceId, "ci")
NUMBER_CALL(nvmlDeviceGetPersistenceMode, "persistence")
NUMBER_CALL(nvmlDeviceGetMaxPcieLinkGeneration, "pcie.generation.max")
NUMBER_CALL(nvmlDeviceGetCurrPcieLinkGeneration, "pcie.generation")
NUMBER_CALL(nvmlDeviceGetMaxPcieLinkWidth, "pcie.width.max")
NUMBER_CALL(nvmlDeviceGetCurrPcieLinkWidth, "pcie.width")
NUMBER_CALL(nvmlDeviceGetPowerUsage, "power")
NUMBER_CALL(nvmlDeviceGetPowerManagementLimit, "power.limit")
NUMBER_CALL(nvmlDeviceGetEnforcedPowerLimit, "power.limit.enforced")
NUMBER_CALL(nvmlDeviceGetFanSpeed, "fan.0")
WIDE_CALL(nvmlDeviceGetCurrentClocksEventReasons, "clocks.reasons")
WIDE_CALL(nvmlDeviceGetCurrentClocksThrottleReasons, "clocks.reasons")

DEVICE_CALL(nvmlDeviceGetAddressingMode, (nvmlDevice_t device, nvmlDeviceAddressingMode_t *mode),
            number(device, "addressing_mode", &mode->value))

static const char *const clocks[] = {"clock.graphics", "clock.sm", "clock.memory", "clock.video"};

DEVICE_CALL(nvmlDeviceGetClockInfo,
            (nvmlDevice_t device, nvmlClockType_t type, unsigned int *value),
            type < COUNT(clocks) ? number(device, clocks[type], value)
                                 : NVML_ERROR_INVALID_ARGUMENT)

DEVICE_CALL(nvmlDeviceGetTemperature,
            (nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *value),
            sensor ? NVML_ERROR_INVALID_ARGUMENT : number(device, "temperature", value))

DEVICE_CALL(nvmlDeviceGetTemperatureV, (nvmlDevice_t device, nvmlTemperature_t *asked),
            asked->version != nvmlTemperature_v1 ? NVML_ERROR_ARGUMENT_VERSION_MISMATCH
            : asked->sensorType                  ? NVML_ERROR_INVALID_ARGUMENT
            : number(device, "temperature", (unsigned int *)&asked->temperature))

/* How busy it is now; in MIG mode nobody can say. */
DEVICE_CALL(nvmlDeviceGetUtilizationRates, (nvmlDevice_t device, nvmlUtilization_t *now),
            in_mig_mode(device) ? NVML_ERROR_NOT_SUPPORTED
                                : number(device, "utilization.gpu", &now->gpu)
                                      ?: number(device, "utilization.memory", &now->memory))

/* The first nvmlDeviceGetMemoryInfo counts what the driver reserves as used, the second apart. */
static nvmlReturn_t memory(nvmlDevice_t device, nvmlMemory_v2_t *now)
{
    now->reserved = number_or(text_of(device, "memory.reserved"), 0);
    nvmlReturn_t status = wide_number(device, "memory.total", &now->total);
    TRY(wide_number(device, "memory.used", &now->used));
    now->free = now->total - now->reserved - now->used;
    return status;
}

static nvmlReturn_t first_memory(nvmlDevice_t device, nvmlMemory_t *found)
{
    nvmlMemory_v2_t now = {0};
    nvmlReturn_t status = memory(device, &now);
    *found = (nvmlMemory_t){now.total, now.free, now.used + now.reserved};
    return status;
}

DEVICE_CALL(nvmlDeviceGetMemoryInfo, (nvmlDevice_t device, nvmlMemory_t *found),
            first_memory(device, found))
DEVICE_CALL(nvmlDeviceGetMemoryInfo_v2, (nvmlDevice_t device, nvmlMemory_v2_t *found),
            found->version == nvmlMemory_v2 ? memory(device, found)
                                            : NVML_ERROR_ARGUMENT_VERSION_MISMATCH)

static const char *const kinds[] = {"corrected", "uncorrected"};
static const char *const locations[] = {"l1",      "l2",  "dram", "register",
                                        "texture", "shm", "cbu",  "sram"};

/* Since the driver was loaded (counter 0). */
DEVICE_CALL(nvmlDeviceGetMemoryErrorCounter,
            (nvmlDevice_t device, nvmlMemoryErrorType_t error, nvmlEccCounterType_t counter,
             nvmlMemoryLocation_t location, unsigned long long *count),
            error >= COUNT(kinds) || counter || location >= COUNT(locations)
                ? NVML_ERROR_INVALID_ARGUMENT
                : integer(text_of(device, "ecc.volatile.%s.%s", kinds[error], locations[location]),
                          count))

/* fabric.state and fabric.status; a card that has neither is in no fabric (state 0). */
DEVICE_CALL(nvmlDeviceGetGpuFabricInfo, (nvmlDevice_t device, nvmlGpuFabricInfo_t *fabric),
            (fabric->state = (unsigned char)number_or(text_of(device, "fabric.state"), 0),
             fabric->status = (nvmlReturn_t)number_or(text_of(device, "fabric.status"), 0),
             NVML_SUCCESS))

/* Version 3, with fabric.summary, where that is set; else version 2. */
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t *fabric)
{
    nvmlReturn_t status = begin(__func__, device);
    const char *summary = status == NVML_SUCCESS ? text_of(device, "fabric.summary") : NULL;
    unsigned int known = summary ? nvmlGpuFabricInfo_v3 : nvmlGpuFabricInfo_v2;
    FAIL_IF(fabric->version != known, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    if (status == NVML_SUCCESS) {
        fabric->state = (unsigned char)number_or(text_of(device, "fabric.state"), 0);
        fabric->status = (nvmlReturn_t)number_or(text_of(device, "fabric.status"), 0);
        fabric->healthMask = (unsigned int)number_or(text_of(device, "fabric.mask"), 0);
        if (summary)
            fabric->healthSummary = (unsigned char)number_or(summary, 0);
    }
    return end(status);
}
