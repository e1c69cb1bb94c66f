/* SPDX-License-Identifier: Apache-2.0
 *
 * The part of NVIDIA's management library that the double speaks, in declarations of our own: the
 * names and shapes that its clients link against (as in nvidia-ml-py, which is BSD), no more.
 * tests/unit/nvml_double/test_faithful.py holds every size, offset, number and prototype against
 * NVIDIA's own nvml.h: with VENDOR_HEADER defined, that header stands in for this one.
 */
#ifndef NVML_API_H
#define NVML_API_H

#ifdef VENDOR_HEADER
#define NVML_NO_UNVERSIONED_FUNC_DEFS /* the double defines the first versions as well */
#include <nvml.h>
#else

/* Handles. */
typedef struct nvmlDevice_st *nvmlDevice_t;
typedef struct nvmlEventSet_st *nvmlEventSet_t;
typedef struct nvmlGpmSample_st *nvmlGpmSample_t;
typedef struct nvmlGpuInstance_st *nvmlGpuInstance_t;
typedef struct nvmlComputeInstance_st *nvmlComputeInstance_t;

/* Every enumeration of the library is passed as an unsigned int. */
typedef unsigned int nvmlReturn_t, nvmlEnableState_t, nvmlValueType_t, nvmlBrandType_t;
typedef unsigned int nvmlClockType_t, nvmlClockId_t, nvmlTemperatureSensors_t, nvmlPstates_t;
typedef unsigned int nvmlTemperatureThresholds_t, nvmlComputeMode_t, nvmlSamplingType_t;
typedef unsigned int nvmlMemoryErrorType_t, nvmlEccCounterType_t, nvmlMemoryLocation_t;
typedef unsigned int nvmlPageRetirementCause_t, nvmlPcieUtilCounter_t, nvmlPerfPolicyType_t;
typedef unsigned int nvmlGpuTopologyLevel_t, nvmlGpuP2PCapsIndex_t, nvmlGpuP2PStatus_t;
typedef unsigned int nvmlNvLinkCapability_t, nvmlNvLinkErrorCounter_t, nvmlIntNvLinkDeviceType_t;
typedef unsigned int nvmlAffinityScope_t, nvmlDeviceArchitecture_t, nvmlInforomObject_t;
typedef unsigned int nvmlGpuVirtualizationMode_t, nvmlBusType_t, nvmlPowerSource_t;

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_MEMORY = 20,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_UNKNOWN = 999
};

enum { /* nvmlValueType_t */
    NVML_VALUE_TYPE_UNSIGNED_INT = 1,
    NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3,
    NVML_VALUE_TYPE_SIGNED_INT = 5
};

enum { /* sizes that stand in structures */
    NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE = 32,
    NVML_DEVICE_PCI_BUS_ID_BUFFER_V2_SIZE = 16,
    NVML_DEVICE_UUID_ASCII_LEN = 41,
    NVML_DEVICE_UUID_BINARY_LEN = 16,
    NVML_UUID_TYPE_ASCII = 1,
    NVML_GPM_METRIC_MAX = 477,
    NVML_GPM_METRICS_GET_VERSION = 1,
    NVML_GPM_SUPPORT_VERSION = 1,
    NVML_NVLINK_MAX_LINKS = 36
};

/* The version word of a versioned structure: its size, and its version in the highest byte. */
#define NVML_STRUCT_VERSION(name, n) \
    (unsigned int)(sizeof(nvml##name##_v##n##_t) | ((unsigned int)(n) << 24))
#define nvmlMemory_v2 NVML_STRUCT_VERSION(Memory, 2)
#define nvmlGpuFabricInfo_v2 NVML_STRUCT_VERSION(GpuFabricInfo, 2)
#define nvmlGpuFabricInfo_v3 NVML_STRUCT_VERSION(GpuFabricInfo, 3)
#define nvmlPciInfoExt_v1 NVML_STRUCT_VERSION(PciInfoExt, 1)
#define nvmlProcessDetailList_v1 NVML_STRUCT_VERSION(ProcessDetailList, 1)
#define nvmlProcessesUtilizationInfo_v1 NVML_STRUCT_VERSION(ProcessesUtilizationInfo, 1)
#define nvmlTemperature_v1 NVML_STRUCT_VERSION(Temperature, 1)
#define nvmlMarginTemperature_v1 NVML_STRUCT_VERSION(MarginTemperature, 1)
#define nvmlEccSramErrorStatus_v1 NVML_STRUCT_VERSION(EccSramErrorStatus, 1)

typedef struct {
    unsigned char clusterUuid[16];
    nvmlReturn_t status;
    unsigned int cliqueId;
    unsigned char state;
} nvmlGpuFabricInfo_t;

typedef struct {
    unsigned int version;
    unsigned char clusterUuid[16];
    nvmlReturn_t status;
    unsigned int cliqueId;
    unsigned char state;
    unsigned int healthMask;
} nvmlGpuFabricInfo_v2_t;

typedef struct {
    unsigned int version;
    unsigned char clusterUuid[16];
    nvmlReturn_t status;
    unsigned int cliqueId;
    unsigned char state;
    unsigned int healthMask;
    unsigned char healthSummary;
} nvmlGpuFabricInfo_v3_t, nvmlGpuFabricInfoV_t;

typedef struct {
    unsigned int version, value;
} nvmlDeviceAddressingMode_v1_t, nvmlDeviceAddressingMode_t;

typedef struct {
    char busIdLegacy[NVML_DEVICE_PCI_BUS_ID_BUFFER_V2_SIZE];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE];
} nvmlPciInfo_t;

typedef struct {
    unsigned int version, domain, bus, device;
    unsigned int pciDeviceId, pciSubSystemId, baseClass, subClass;
    char busId[NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE];
} nvmlPciInfoExt_v1_t, nvmlPciInfoExt_t;

typedef struct {
    unsigned int version, type;
    union {
        char str[NVML_DEVICE_UUID_ASCII_LEN];
        unsigned char bytes[NVML_DEVICE_UUID_BINARY_LEN];
    } value;
} nvmlUUID_v1_t, nvmlUUID_t;
#define nvmlUUID_v1 NVML_STRUCT_VERSION(UUID, 1)

typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;
typedef struct { unsigned long long bar1Total, bar1Free, bar1Used; } nvmlBAR1Memory_t;
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;

typedef union {
    double dVal;
    int siVal;
    unsigned int uiVal;
    unsigned long ulVal;
    unsigned long long ullVal;
    signed long long sllVal;
    unsigned short usVal;
} nvmlValue_t;
typedef struct {
    unsigned long long timeStamp;
    nvmlValue_t sampleValue;
} nvmlSample_t;
typedef struct {
    unsigned int fieldId, scopeId;
    long long timestamp, latencyUsec;
    nvmlValueType_t valueType;
    nvmlReturn_t nvmlReturn;
    nvmlValue_t value;
} nvmlFieldValue_t;
typedef struct { unsigned long long referenceTime, violationTime; } nvmlViolationTime_t;

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
} nvmlProcessInfo_v1_t;
typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_v2_t, nvmlProcessInfo_t;
typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
    unsigned long long usedGpuCcProtectedMemory;
} nvmlProcessDetail_v1_t;
typedef struct {
    unsigned int version, mode, numProcArrayEntries;
    nvmlProcessDetail_v1_t *procArray;
} nvmlProcessDetailList_v1_t, nvmlProcessDetailList_t;
typedef struct {
    unsigned int pid;
    unsigned long long timeStamp;
    unsigned int smUtil, memUtil, encUtil, decUtil;
} nvmlProcessUtilizationSample_t;
typedef struct {
    unsigned long long timeStamp;
    unsigned int pid, smUtil, memUtil, encUtil, decUtil, jpgUtil, ofaUtil;
} nvmlProcessUtilizationInfo_v1_t;
typedef struct {
    unsigned int version, processSamplesCount;
    unsigned long long lastSeenTimeStamp;
    nvmlProcessUtilizationInfo_v1_t *procUtilArray;
} nvmlProcessesUtilizationInfo_v1_t, nvmlProcessesUtilizationInfo_t;

typedef struct {
    unsigned int gpuUtilization, memoryUtilization;
    unsigned long long maxMemoryUsage, time, startTime;
    unsigned int isRunning, reserved[5];
} nvmlAccountingStats_t;

typedef struct {
    unsigned long long l1Cache, l2Cache, deviceMemory, registerFile;
} nvmlEccErrorCounts_t;
typedef struct {
    unsigned int version;
    unsigned long long aggregateUncParity, aggregateUncSecDed, aggregateCor;
    unsigned long long volatileUncParity, volatileUncSecDed, volatileCor;
    unsigned long long aggregateUncBucketL2, aggregateUncBucketSm, aggregateUncBucketPcie;
    unsigned long long aggregateUncBucketMcu, aggregateUncBucketOther;
    unsigned int bThresholdExceeded;
} nvmlEccSramErrorStatus_v1_t, nvmlEccSramErrorStatus_t;
typedef struct { unsigned int max, high, partial, low, none; } nvmlRowRemapperHistogramValues_t;
typedef struct {
    unsigned int corrActiveRemaps, corrInactiveRemaps, uncActiveRemaps, uncInactiveRemaps;
    unsigned int bPending, bFailureOccurred;
} nvmlRemappedRowsInfo_v2_t;

typedef struct {
    unsigned int version;
    nvmlTemperatureSensors_t sensorType;
    int temperature;
} nvmlTemperature_v1_t, nvmlTemperature_t;
typedef struct {
    unsigned int version;
    int marginTemperature;
} nvmlMarginTemperature_v1_t, nvmlMarginTemperature_t;

typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

typedef struct {
    unsigned int metricId;
    nvmlReturn_t nvmlReturn;
    double value;
    struct { char *shortName, *longName, *unit; } metricInfo;
} nvmlGpmMetric_t;
typedef struct {
    unsigned int version, numMetrics;
    nvmlGpmSample_t sample1, sample2;
    nvmlGpmMetric_t metrics[NVML_GPM_METRIC_MAX];
} nvmlGpmMetricsGet_t;
typedef struct { unsigned int version, isSupportedDevice; } nvmlGpmSupport_t;

typedef struct {
    unsigned int multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount;
    unsigned int sharedEncoderCount, sharedJpegCount, sharedOfaCount;
    unsigned int gpuInstanceSliceCount, computeInstanceSliceCount;
    unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;
typedef struct { unsigned int start, size; } nvmlGpuInstancePlacement_t;
typedef struct { unsigned int start, size; } nvmlComputeInstancePlacement_t;
typedef struct {
    nvmlDevice_t device;
    unsigned int id, profileId;
    nvmlGpuInstancePlacement_t placement;
} nvmlGpuInstanceInfo_t;
typedef struct {
    nvmlDevice_t device;
    nvmlGpuInstance_t gpuInstance;
    unsigned int id, profileId;
    nvmlComputeInstancePlacement_t placement;
} nvmlComputeInstanceInfo_t;

#endif /* VENDOR_HEADER */
#endif
