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
typedef struct nvmlGpmSample_st *nvmlGpmSample_t;

/* Every enumeration of the library is passed as an unsigned int. */
typedef unsigned int nvmlReturn_t, nvmlEnableState_t, nvmlValueType_t, nvmlClockType_t;
typedef unsigned int nvmlTemperatureSensors_t, nvmlSamplingType_t;
typedef unsigned int nvmlMemoryErrorType_t, nvmlEccCounterType_t, nvmlMemoryLocation_t;
typedef unsigned int nvmlIntNvLinkDeviceType_t;

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
    NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3
};

enum { NVML_GPU_UTILIZATION_SAMPLES = 1 }; /* nvmlSamplingType_t */

enum { /* sizes that stand in structures */
    NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE = 32,
    NVML_DEVICE_PCI_BUS_ID_BUFFER_V2_SIZE = 16,
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
#define nvmlTemperature_v1 NVML_STRUCT_VERSION(Temperature, 1)

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

typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;
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
    unsigned int version;
    nvmlTemperatureSensors_t sensorType;
    int temperature;
} nvmlTemperature_v1_t, nvmlTemperature_t;

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

#endif /* VENDOR_HEADER */
#endif
