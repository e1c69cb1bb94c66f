/* SPDX-License-Identifier: Apache-2.0
 *
 * Prints the size of each structure, the place of each member and the value of each number that
 * the double relies on. Built twice, with our declarations and (VENDOR_HEADER) with NVIDIA's
 * nvml.h, it must print the same. A member that only one of them has does not compile.
 */
#include <stddef.h>
#include <stdio.h>

#include "../nvml_api.h"

#define TYPE(type) printf("%s %zu\n", #type, sizeof(type))
#define AT(type, member)                                                                \
    printf("%s.%s %zu %zu\n", #type, #member, offsetof(type, member), sizeof(((type *)0)->member))
#define NUMBER(name) printf("%s %u\n", #name, (unsigned int)(name))

static void devices(void)
{
    TYPE(nvmlPciInfo_t);
    AT(nvmlPciInfo_t, busIdLegacy);
    AT(nvmlPciInfo_t, domain);
    AT(nvmlPciInfo_t, bus);
    AT(nvmlPciInfo_t, device);
    AT(nvmlPciInfo_t, pciDeviceId);
    AT(nvmlPciInfo_t, pciSubSystemId);
    AT(nvmlPciInfo_t, busId);
    TYPE(nvmlPciInfoExt_t);
    AT(nvmlPciInfoExt_t, pciDeviceId);
    AT(nvmlPciInfoExt_t, baseClass);
    AT(nvmlPciInfoExt_t, busId);
    TYPE(nvmlGpuFabricInfo_v2_t);
    AT(nvmlGpuFabricInfo_v2_t, healthMask);
    TYPE(nvmlGpuFabricInfo_v3_t);
    AT(nvmlGpuFabricInfo_v3_t, state);
    AT(nvmlGpuFabricInfo_v3_t, healthSummary);
    NUMBER(nvmlGpuFabricInfo_v3);
    TYPE(nvmlDeviceAddressingMode_t);
    AT(nvmlDeviceAddressingMode_t, version);
    AT(nvmlDeviceAddressingMode_t, value);
    TYPE(nvmlUUID_t);
    AT(nvmlUUID_t, type);
    AT(nvmlUUID_t, value.str);
    AT(nvmlUUID_t, value.bytes);
    TYPE(nvmlMemory_t);
    AT(nvmlMemory_t, total);
    AT(nvmlMemory_t, free);
    AT(nvmlMemory_t, used);
    TYPE(nvmlMemory_v2_t);
    AT(nvmlMemory_v2_t, total);
    AT(nvmlMemory_v2_t, reserved);
    AT(nvmlMemory_v2_t, free);
    AT(nvmlMemory_v2_t, used);
    TYPE(nvmlBAR1Memory_t);
    AT(nvmlBAR1Memory_t, bar1Total);
    AT(nvmlBAR1Memory_t, bar1Free);
    AT(nvmlBAR1Memory_t, bar1Used);
    TYPE(nvmlUtilization_t);
    AT(nvmlUtilization_t, gpu);
    AT(nvmlUtilization_t, memory);
}

static void values(void)
{
    TYPE(nvmlValue_t);
    TYPE(nvmlSample_t);
    AT(nvmlSample_t, timeStamp);
    AT(nvmlSample_t, sampleValue.uiVal);
    TYPE(nvmlFieldValue_t);
    AT(nvmlFieldValue_t, fieldId);
    AT(nvmlFieldValue_t, scopeId);
    AT(nvmlFieldValue_t, timestamp);
    AT(nvmlFieldValue_t, latencyUsec);
    AT(nvmlFieldValue_t, valueType);
    AT(nvmlFieldValue_t, nvmlReturn);
    AT(nvmlFieldValue_t, value.ullVal);
    TYPE(nvmlViolationTime_t);
    AT(nvmlViolationTime_t, referenceTime);
    AT(nvmlViolationTime_t, violationTime);
    TYPE(nvmlTemperature_t);
    AT(nvmlTemperature_t, sensorType);
    AT(nvmlTemperature_t, temperature);
    TYPE(nvmlMarginTemperature_t);
    AT(nvmlMarginTemperature_t, marginTemperature);
    TYPE(nvmlEventData_t);
    AT(nvmlEventData_t, eventType);
    AT(nvmlEventData_t, eventData);
    AT(nvmlEventData_t, gpuInstanceId);
    AT(nvmlEventData_t, computeInstanceId);
}

static void processes(void)
{
    TYPE(nvmlProcessInfo_v1_t);
    AT(nvmlProcessInfo_v1_t, usedGpuMemory);
    TYPE(nvmlProcessInfo_v2_t);
    TYPE(nvmlProcessInfo_t);
    AT(nvmlProcessInfo_t, pid);
    AT(nvmlProcessInfo_t, usedGpuMemory);
    AT(nvmlProcessInfo_t, gpuInstanceId);
    AT(nvmlProcessInfo_t, computeInstanceId);
    TYPE(nvmlProcessDetail_v1_t);
    AT(nvmlProcessDetail_v1_t, usedGpuCcProtectedMemory);
    TYPE(nvmlProcessDetailList_t);
    AT(nvmlProcessDetailList_t, mode);
    AT(nvmlProcessDetailList_t, numProcArrayEntries);
    AT(nvmlProcessDetailList_t, procArray);
    TYPE(nvmlProcessUtilizationSample_t);
    AT(nvmlProcessUtilizationSample_t, timeStamp);
    AT(nvmlProcessUtilizationSample_t, smUtil);
    AT(nvmlProcessUtilizationSample_t, decUtil);
    TYPE(nvmlProcessUtilizationInfo_v1_t);
    AT(nvmlProcessUtilizationInfo_v1_t, pid);
    AT(nvmlProcessUtilizationInfo_v1_t, ofaUtil);
    TYPE(nvmlProcessesUtilizationInfo_t);
    AT(nvmlProcessesUtilizationInfo_t, processSamplesCount);
    AT(nvmlProcessesUtilizationInfo_t, lastSeenTimeStamp);
    AT(nvmlProcessesUtilizationInfo_t, procUtilArray);
    TYPE(nvmlAccountingStats_t);
    AT(nvmlAccountingStats_t, memoryUtilization);
    AT(nvmlAccountingStats_t, maxMemoryUsage);
    AT(nvmlAccountingStats_t, time);
    AT(nvmlAccountingStats_t, startTime);
    AT(nvmlAccountingStats_t, isRunning);
}

static void health(void)
{
    TYPE(nvmlEccErrorCounts_t);
    AT(nvmlEccErrorCounts_t, deviceMemory);
    AT(nvmlEccErrorCounts_t, registerFile);
    TYPE(nvmlEccSramErrorStatus_t);
    AT(nvmlEccSramErrorStatus_t, aggregateUncParity);
    AT(nvmlEccSramErrorStatus_t, aggregateUncSecDed);
    AT(nvmlEccSramErrorStatus_t, aggregateCor);
    AT(nvmlEccSramErrorStatus_t, volatileUncParity);
    AT(nvmlEccSramErrorStatus_t, volatileUncSecDed);
    AT(nvmlEccSramErrorStatus_t, volatileCor);
    AT(nvmlEccSramErrorStatus_t, aggregateUncBucketL2);
    AT(nvmlEccSramErrorStatus_t, aggregateUncBucketSm);
    AT(nvmlEccSramErrorStatus_t, aggregateUncBucketPcie);
    AT(nvmlEccSramErrorStatus_t, aggregateUncBucketMcu);
    AT(nvmlEccSramErrorStatus_t, aggregateUncBucketOther);
    AT(nvmlEccSramErrorStatus_t, bThresholdExceeded);
    TYPE(nvmlRowRemapperHistogramValues_t);
    AT(nvmlRowRemapperHistogramValues_t, none);
    TYPE(nvmlRemappedRowsInfo_v2_t);
    AT(nvmlRemappedRowsInfo_v2_t, uncActiveRemaps);
    AT(nvmlRemappedRowsInfo_v2_t, bFailureOccurred);
}

static void instances(void)
{
    TYPE(nvmlDeviceAttributes_t);
    AT(nvmlDeviceAttributes_t, sharedOfaCount);
    AT(nvmlDeviceAttributes_t, gpuInstanceSliceCount);
    AT(nvmlDeviceAttributes_t, computeInstanceSliceCount);
    AT(nvmlDeviceAttributes_t, memorySizeMB);
    TYPE(nvmlGpuInstanceInfo_t);
    AT(nvmlGpuInstanceInfo_t, id);
    AT(nvmlGpuInstanceInfo_t, profileId);
    AT(nvmlGpuInstanceInfo_t, placement.size);
    TYPE(nvmlComputeInstanceInfo_t);
    AT(nvmlComputeInstanceInfo_t, gpuInstance);
    AT(nvmlComputeInstanceInfo_t, id);
    TYPE(nvmlGpmMetric_t);
    AT(nvmlGpmMetric_t, nvmlReturn);
    AT(nvmlGpmMetric_t, value);
    AT(nvmlGpmMetric_t, metricInfo.unit);
    TYPE(nvmlGpmMetricsGet_t);
    AT(nvmlGpmMetricsGet_t, numMetrics);
    AT(nvmlGpmMetricsGet_t, sample1);
    AT(nvmlGpmMetricsGet_t, sample2);
    AT(nvmlGpmMetricsGet_t, metrics);
    TYPE(nvmlGpmSupport_t);
    AT(nvmlGpmSupport_t, isSupportedDevice);
}

static void numbers(void)
{
    NUMBER(NVML_ERROR_UNINITIALIZED);
    NUMBER(NVML_ERROR_INVALID_ARGUMENT);
    NUMBER(NVML_ERROR_NOT_SUPPORTED);
    NUMBER(NVML_ERROR_NO_PERMISSION);
    NUMBER(NVML_ERROR_NOT_FOUND);
    NUMBER(NVML_ERROR_INSUFFICIENT_SIZE);
    NUMBER(NVML_ERROR_DRIVER_NOT_LOADED);
    NUMBER(NVML_ERROR_TIMEOUT);
    NUMBER(NVML_ERROR_GPU_IS_LOST);
    NUMBER(NVML_ERROR_MEMORY);
    NUMBER(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    NUMBER(NVML_ERROR_UNKNOWN);
    NUMBER(NVML_VALUE_TYPE_UNSIGNED_INT);
    NUMBER(NVML_VALUE_TYPE_UNSIGNED_LONG_LONG);
    NUMBER(NVML_VALUE_TYPE_SIGNED_INT);
    NUMBER(NVML_UUID_TYPE_ASCII);
    NUMBER(NVML_GPM_METRIC_MAX);
    NUMBER(NVML_GPM_METRICS_GET_VERSION);
    NUMBER(NVML_GPM_SUPPORT_VERSION);
    NUMBER(NVML_NVLINK_MAX_LINKS);
    NUMBER(nvmlUUID_v1);
    NUMBER(nvmlMemory_v2);
    NUMBER(nvmlPciInfoExt_v1);
    NUMBER(nvmlProcessDetailList_v1);
    NUMBER(nvmlProcessesUtilizationInfo_v1);
    NUMBER(nvmlTemperature_v1);
    NUMBER(nvmlMarginTemperature_v1);
    NUMBER(nvmlEccSramErrorStatus_v1);
}

int main(void)
{
    devices();
    values();
    processes();
    health();
    instances();
    numbers();
    return 0;
}
