/* SPDX-License-Identifier: Apache-2.0
 *
 * Power, energy, temperature, clocks, fans, performance state, and why the clocks are low.
 */
#include "double.h"

NUMBER_CALL(nvmlDeviceGetPowerUsage, "power")
NUMBER_CALL(nvmlDeviceGetPowerManagementMode, "power.management")
NUMBER_CALL(nvmlDeviceGetPowerManagementLimit, "power.limit")
NUMBER_CALL(nvmlDeviceGetPowerManagementDefaultLimit, "power.limit.default")
NUMBER_CALL(nvmlDeviceGetEnforcedPowerLimit, "power.limit.enforced")
NUMBER_CALL(nvmlDeviceGetPowerSource, "power.source")
NUMBER_CALL(nvmlDeviceGetFanSpeed, "fan.0")
NUMBER_CALL(nvmlDeviceGetNumFans, "fans")
NUMBER_CALL(nvmlDeviceGetPerformanceState, "pstate")
NUMBER_CALL(nvmlDeviceGetPowerState, "pstate")
LONG_CALL(nvmlDeviceGetTotalEnergyConsumption, "energy")
LONG_CALL(nvmlDeviceGetCurrentClocksEventReasons, "clocks.reasons")
LONG_CALL(nvmlDeviceGetCurrentClocksThrottleReasons, "clocks.reasons")
LONG_CALL(nvmlDeviceGetSupportedClocksEventReasons, "clocks.reasons.supported")
LONG_CALL(nvmlDeviceGetSupportedClocksThrottleReasons, "clocks.reasons.supported")
PAIR_CALL(nvmlDeviceGetPowerManagementLimitConstraints, "power.limit.min", "power.limit.max")
SET_CALL(nvmlDeviceSetPowerManagementLimit, "power.limit")

static const char *const clock_names[] = {"graphics", "sm", "memory", "video"};

CHOICE_CALL(nvmlDeviceGetClockInfo, nvmlClockType_t, "clock.", clock_names)
CHOICE_CALL(nvmlDeviceGetMaxClockInfo, nvmlClockType_t, "clock.max.", clock_names)
CHOICE_CALL(nvmlDeviceGetApplicationsClock, nvmlClockType_t, "clock.application.", clock_names)
CHOICE_CALL(nvmlDeviceGetDefaultApplicationsClock, nvmlClockType_t, "clock.application.default.", clock_names)
CHOICE_CALL(nvmlDeviceGetMaxCustomerBoostClock, nvmlClockType_t, "clock.boost.", clock_names)

nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, nvmlClockType_t type, nvmlClockId_t which,
                                unsigned int *clock)
{
    static const char *const kinds[] = {"clock.", "clock.application.",
                                        "clock.application.default.", "clock.boost."};
    const char *prefix = which < COUNT(kinds) ? kinds[which] : "clock.none.";
    return answer_choice(__func__, device, prefix, clock_names, COUNT(clock_names), type, clock);
}

CALL(nvmlDeviceGetSupportedMemoryClocks,
     (nvmlDevice_t device, unsigned int *count, unsigned int *clocks),
     answer_list(__func__, device, "clocks.memory", count, clocks))

nvmlReturn_t nvmlDeviceGetSupportedGraphicsClocks(nvmlDevice_t device, unsigned int memory_clock,
                                                  unsigned int *count, unsigned int *clocks)
{
    (void)memory_clock;
    return answer_list(__func__, device, "clocks.graphics", count, clocks);
}

nvmlReturn_t nvmlDeviceGetFanSpeed_v2(nvmlDevice_t device, unsigned int fan, unsigned int *speed)
{
    static const char *const fans[] = {"0", "1", "2", "3"};
    return answer_choice(__func__, device, "fan.", fans, COUNT(fans), fan, speed);
}

static const char *const sensors[] = {"temperature"};

CHOICE_CALL(nvmlDeviceGetTemperature, nvmlTemperatureSensors_t, "", sensors)

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature)
{
    unsigned int value = 0;
    bool known = temperature && temperature->version == nvmlTemperature_v1;
    nvmlReturn_t status = answer_choice(__func__, device, "", sensors, COUNT(sensors),
                                        known ? temperature->sensorType : COUNT(sensors), &value);
    if (status == NVML_SUCCESS)
        temperature->temperature = (int)value;
    return temperature && !known ? NVML_ERROR_ARGUMENT_VERSION_MISMATCH : status;
}

nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device,
                                               nvmlTemperatureThresholds_t which,
                                               unsigned int *temperature)
{
    static const char *const names[] = {"shutdown", "slowdown", "memory_max", "gpu_max",
                                        "acoustic_min", "acoustic", "acoustic_max", "gps"};
    return answer_choice(__func__, device, "temperature.", names, COUNT(names), which, temperature);
}

nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, nvmlMarginTemperature_t *margin)
{
    unsigned int value = 0;
    bool known = margin && margin->version == nvmlMarginTemperature_v1;
    nvmlReturn_t status = answer_number(__func__, device, "temperature.margin", &value);
    if (status == NVML_SUCCESS && known)
        margin->marginTemperature = (int)value;
    return status == NVML_SUCCESS && !known ? NVML_ERROR_ARGUMENT_VERSION_MISMATCH : status;
}

/* Nanoseconds that a policy held the clocks down; the same keys as field values 74 to 81. */
nvmlReturn_t nvmlDeviceGetViolationStatus(nvmlDevice_t device, nvmlPerfPolicyType_t policy,
                                          nvmlViolationTime_t *violation)
{
    static const char *const names[] = {"power", "thermal", "sync_boost", "board_limit",
                                        "low_utilization", "reliability", "", "", "", "",
                                        "application_clocks", "base_clocks"};
    nvmlReturn_t status = begin(__func__, device);
    FAIL_IF(policy >= COUNT(names) || !violation, NVML_ERROR_INVALID_ARGUMENT);
    if (status == NVML_SUCCESS)
        status = integer(text_format(device, "violation.%s", names[policy]),
                         &violation->violationTime);
    if (status == NVML_SUCCESS)
        violation->referenceTime = (unsigned long long)now_us();
    return end(status);
}
