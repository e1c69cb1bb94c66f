# SPDX-License-Identifier: Apache-2.0
# nvidia-ml-py carries no types: the part of it that gpulock calls.
import ctypes
from collections.abc import Sequence

NVML_ERROR_UNINITIALIZED: int
NVML_ERROR_INVALID_ARGUMENT: int
NVML_ERROR_NOT_SUPPORTED: int
NVML_ERROR_NO_PERMISSION: int
NVML_ERROR_NOT_FOUND: int
NVML_ERROR_INSUFFICIENT_SIZE: int
NVML_ERROR_DRIVER_NOT_LOADED: int
NVML_ERROR_TIMEOUT: int
NVML_ERROR_LIBRARY_NOT_FOUND: int
NVML_ERROR_FUNCTION_NOT_FOUND: int
NVML_ERROR_GPU_IS_LOST: int
NVML_ERROR_RESET_REQUIRED: int
NVML_ERROR_LIB_RM_VERSION_MISMATCH: int

nvmlLib: ctypes.CDLL | None  # loaded by nvmlInit

class NVMLError(Exception):
    value: int
    def __init__(self, value: int) -> None: ...

class c_nvmlDevice_t(ctypes.c_void_p): ...  # opaque pointers
class c_nvmlEventSet_t: ...
class c_nvmlGpmSample_t: ...

class c_nvmlPciInfo_t:
    busId: str

class c_nvmlMemory_t:
    total: int
    used: int

class c_nvmlUtilization_t:
    gpu: int
    memory: int

class c_nvmlValue_t:
    dVal: float
    uiVal: int
    ulVal: int
    ullVal: int
    sllVal: int
    siVal: int
    usVal: int

class c_nvmlSample_t:
    timeStamp: int
    sampleValue: c_nvmlValue_t

class c_nvmlFieldValue_t(ctypes.Structure):
    fieldId: int
    scopeId: int
    valueType: int
    nvmlReturn: int
    value: c_nvmlValue_t

class c_nvmlGpmSupport_t:
    isSupportedDevice: int

class c_nvmlGpmMetric_t(ctypes.Structure):
    metricId: int
    nvmlReturn: int
    value: float

class c_nvmlGpmMetricsGet_t(ctypes.Structure):
    version: int
    numMetrics: int
    sample1: c_nvmlGpmSample_t
    sample2: c_nvmlGpmSample_t
    metrics: Sequence[c_nvmlGpmMetric_t]

NVML_GPM_METRICS_GET_VERSION: int
NVML_CLOCK_SM: int
NVML_CLOCK_MEM: int
NVML_TEMPERATURE_GPU: int
NVML_GPU_UTILIZATION_SAMPLES: int
NVML_MEMORY_ERROR_TYPE_CORRECTED: int
NVML_MEMORY_ERROR_TYPE_UNCORRECTED: int
NVML_VOLATILE_ECC: int
NVML_MEMORY_LOCATION_SRAM: int
NVML_NVLINK_DEVICE_TYPE_GPU: int
NVML_NVLINK_DEVICE_TYPE_SWITCH: int
nvmlEventTypeXidCriticalError: int
nvmlMemory_v2: int

def nvmlInit() -> None: ...
def nvmlShutdown() -> None: ...
def nvmlSystemGetDriverVersion() -> str: ...
def nvmlDeviceGetCount() -> int: ...
def nvmlDeviceGetHandleByIndex(index: int) -> c_nvmlDevice_t: ...
def nvmlDeviceGetMinorNumber(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetPciInfo(handle: c_nvmlDevice_t) -> c_nvmlPciInfo_t: ...
def nvmlDeviceGetUUID(handle: c_nvmlDevice_t) -> str: ...
def nvmlDeviceGetName(handle: c_nvmlDevice_t) -> str: ...
def nvmlDeviceGetPersistenceMode(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetUtilizationRates(handle: c_nvmlDevice_t) -> c_nvmlUtilization_t: ...
def nvmlDeviceGetSamples(
    device: c_nvmlDevice_t, sampling_type: int, timeStamp: int
) -> tuple[int, list[c_nvmlSample_t]]: ...
def nvmlDeviceGetMemoryInfo(
    handle: c_nvmlDevice_t, version: int | None = None
) -> c_nvmlMemory_t: ...
def nvmlDeviceGetPowerUsage(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetTemperature(handle: c_nvmlDevice_t, sensor: int) -> int: ...
def nvmlDeviceGetTemperatureV(handle: c_nvmlDevice_t, sensor: int) -> int: ...
def nvmlDeviceGetClockInfo(handle: c_nvmlDevice_t, type: int) -> int: ...
def nvmlDeviceGetCurrentClocksEventReasons(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetCurrentClocksThrottleReasons(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetMemoryErrorCounter(
    handle: c_nvmlDevice_t, errorType: int, counterType: int, locationType: int
) -> int: ...
def nvmlDeviceGetFieldValues(
    handle: c_nvmlDevice_t, fieldIds: list[tuple[int, int]]
) -> Sequence[c_nvmlFieldValue_t]: ...
def nvmlDeviceGetNvLinkState(device: c_nvmlDevice_t, link: int) -> int: ...
def nvmlDeviceGetNvLinkRemoteDeviceType(handle: c_nvmlDevice_t, link: int) -> int: ...
def nvmlDeviceGetNvLinkRemotePciInfo(device: c_nvmlDevice_t, link: int) -> c_nvmlPciInfo_t: ...
def nvmlDeviceGetMigMode(device: c_nvmlDevice_t) -> tuple[int, int]: ...
def nvmlDeviceGetMaxMigDeviceCount(device: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetMigDeviceHandleByIndex(device: c_nvmlDevice_t, index: int) -> c_nvmlDevice_t: ...
def nvmlDeviceGetGpuInstanceId(device: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetComputeInstanceId(device: c_nvmlDevice_t) -> int: ...
def nvmlEventSetCreate() -> c_nvmlEventSet_t: ...
def nvmlEventSetFree(eventSet: c_nvmlEventSet_t) -> None: ...
def nvmlDeviceRegisterEvents(
    handle: c_nvmlDevice_t, eventTypes: int, eventSet: c_nvmlEventSet_t
) -> None: ...
def nvmlGpmQueryDeviceSupport(device: c_nvmlDevice_t) -> c_nvmlGpmSupport_t: ...
def nvmlGpmSampleAlloc() -> c_nvmlGpmSample_t: ...
def nvmlGpmSampleFree(gpmSample: c_nvmlGpmSample_t) -> None: ...
def nvmlGpmSampleGet(device: c_nvmlDevice_t, gpmSample: c_nvmlGpmSample_t) -> c_nvmlGpmSample_t: ...
def nvmlGpmMigSampleGet(
    device: c_nvmlDevice_t, gpuInstanceId: int, gpmSample: c_nvmlGpmSample_t
) -> c_nvmlGpmSample_t: ...
def nvmlGpmMetricsGet(metricsGet: c_nvmlGpmMetricsGet_t) -> c_nvmlGpmMetricsGet_t: ...
