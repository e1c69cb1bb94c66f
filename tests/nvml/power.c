/* SPDX-License-Identifier: Apache-2.0
 *
 * Power, energy, temperature, clocks, fans, and why the clocks are low.
 */
#include "double.h"

NUMBER_CALL(nvmlDeviceGetPowerUsage, "power")
NUMBER_CALL(nvmlDeviceGetPowerManagementLimit, "power.limit")
NUMBER_CALL(nvmlDeviceGetEnforcedPowerLimit, "power.limit.enforced")
NUMBER_CALL(nvmlDeviceGetFanSpeed, "fan.0")
LONG_CALL(nvmlDeviceGetCurrentClocksEventReasons, "clocks.reasons")
LONG_CALL(nvmlDeviceGetCurrentClocksThrottleReasons, "clocks.reasons")

static const char *const clock_names[] = {"graphics", "sm", "memory", "video"};

CHOICE_CALL(nvmlDeviceGetClockInfo, nvmlClockType_t, "clock.", clock_names)

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
