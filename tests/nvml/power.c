/* SPDX-License-Identifier: Apache-2.0
 *
 * Power, energy, temperature, clocks, fans, performance state, and why the clocks are low.
 */
#include "double.h"

NUMBER_CALL(nvmlDeviceGetPerformanceState, "pstate")
NUMBER_CALL(nvmlDeviceGetPowerUsage, "power")
NUMBER_CALL(nvmlDeviceGetPowerManagementLimit, "power.limit")
NUMBER_CALL(nvmlDeviceGetEnforcedPowerLimit, "power.limit.enforced")
NUMBER_CALL(nvmlDeviceGetFanSpeed, "fan.0")
LONG_CALL(nvmlDeviceGetCurrentClocksEventReasons, "clocks.reasons")
LONG_CALL(nvmlDeviceGetCurrentClocksThrottleReasons, "clocks.reasons")

static const char *const clock_names[] = {"graphics", "sm", "memory", "video"};

CHOICE_CALL(nvmlDeviceGetClockInfo, nvmlClockType_t, "clock.", clock_names)
CHOICE_CALL(nvmlDeviceGetMaxClockInfo, nvmlClockType_t, "clock.max.", clock_names)
CHOICE_CALL(nvmlDeviceGetApplicationsClock, nvmlClockType_t, "clock.application.", clock_names)

CALL(nvmlDeviceGetSupportedMemoryClocks,
     (nvmlDevice_t device, unsigned int *count, unsigned int *clocks),
     answer_list(__func__, device, "clocks.memory", count, clocks))

nvmlReturn_t nvmlDeviceGetSupportedGraphicsClocks(nvmlDevice_t device, unsigned int memory_clock,
                                                  unsigned int *count, unsigned int *clocks)
{
    (void)memory_clock;
    return answer_list(__func__, device, "clocks.graphics", count, clocks);
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
