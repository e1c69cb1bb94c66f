# SPDX-License-Identifier: Apache-2.0
"""With which release branch of the driver a function of its library first came.

Found by comparing the headers of CUDA 11.0 to 13.3, as go-nvml's history has them (the newest
branch here: what only nvidia-ml-py 13.615 and nvidia-nvml-dev 13.5 name), and the branch that
each CUDA came with. What came with MIG (450) is that of CUDA 11.0 which serves MIG and A100. Of
older headers (375.66) one thing is here that clients meet: the second way to wait for events.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_FIRST = {
    450: """
        ComputeInstanceDestroy ComputeInstanceGetInfo DeviceCreateGpuInstance
        DeviceGetArchitecture DeviceGetAttributes DeviceGetComputeInstanceId
        DeviceGetCpuAffinityWithinScope DeviceGetDeviceHandleFromMigDeviceHandle
        DeviceGetGpuInstanceById DeviceGetGpuInstanceId
        DeviceGetGpuInstancePossiblePlacements DeviceGetGpuInstanceProfileInfo
        DeviceGetGpuInstanceRemainingCapacity DeviceGetGpuInstances
        DeviceGetMaxMigDeviceCount DeviceGetMemoryAffinity DeviceGetMigDeviceHandleByIndex
        DeviceGetMigMode DeviceGetRemappedRows DeviceIsMigDeviceHandle DeviceSetMigMode
        EventSetWait_v2
        GpuInstanceCreateComputeInstance GpuInstanceDestroy
        GpuInstanceGetComputeInstanceById GpuInstanceGetComputeInstanceProfileInfo
        GpuInstanceGetComputeInstanceRemainingCapacity GpuInstanceGetComputeInstances
        GpuInstanceGetInfo
    """,
    455: """
        DeviceGetAttributes_v2 DeviceGetComputeRunningProcesses_v2
        DeviceGetGraphicsRunningProcesses_v2 DeviceGetRowRemapperHistogram
        VgpuTypeGetGpuInstanceProfileId
    """,
    460: """
        ComputeInstanceGetInfo_v2 DeviceCreateGpuInstanceWithPlacement
        DeviceSetTemperatureThreshold VgpuInstanceGetGpuInstanceId
    """,
    465: """
        DeviceResetMemoryLockedClocks DeviceSetMemoryLockedClocks GetExcludedDeviceCount
        GetExcludedDeviceInfoByIndex
    """,
    470: """
        DeviceGetClkMonStatus DeviceGetGpuInstancePossiblePlacements_v2
        DeviceGetGridLicensableFeatures_v4 DeviceGetMPSComputeRunningProcesses
        DeviceGetMPSComputeRunningProcesses_v2 DeviceGetNvLinkRemoteDeviceType
    """,
    495: """
        DeviceGetBusType DeviceGetIrqNum VgpuInstanceGetLicenseInfo
    """,
    510: """
        DeviceGetAdaptiveClockInfoStatus DeviceGetComputeRunningProcesses_v3
        DeviceGetGpuInstanceProfileInfoV DeviceGetGraphicsRunningProcesses_v3
        DeviceGetMPSComputeRunningProcesses_v3 DeviceGetMemoryBusWidth
        DeviceGetMemoryInfo_v2 DeviceGetNumFans DeviceGetNumGpuCores
        DeviceGetPcieLinkMaxSpeed DeviceGetPowerSource
        GpuInstanceGetComputeInstanceProfileInfoV VgpuInstanceGetGpuPciId
        VgpuInstanceGetLicenseInfo_v2
    """,
    515: """
        DeviceGetDefaultEccMode DeviceGetDynamicPstatesInfo DeviceGetGpcClkVfOffset
        DeviceGetGspFirmwareMode DeviceGetGspFirmwareVersion DeviceGetMinMaxClockOfPState
        DeviceGetMinMaxFanSpeed DeviceGetPcieSpeed DeviceGetSupportedPerformanceStates
        DeviceGetThermalSettings DeviceSetDefaultFanSpeed_v2 DeviceSetFanSpeed_v2
        DeviceSetGpcClkVfOffset VgpuTypeGetCapabilities
    """,
    520: """
        DeviceGetGpcClkMinMaxVfOffset DeviceGetMemClkMinMaxVfOffset DeviceGetMemClkVfOffset
        DeviceGetTargetFanSpeed DeviceSetMemClkVfOffset GpmMetricsGet GpmQueryDeviceSupport
        GpmSampleAlloc GpmSampleFree GpmSampleGet
    """,
    525: """
        DeviceClearFieldValues DeviceGetFanControlPolicy_v2 DeviceGetGpuFabricInfo
        DeviceGetGpuMaxPcieLinkGeneration DeviceGetVgpuCapabilities
        DeviceGetVgpuSchedulerCapabilities DeviceGetVgpuSchedulerLog
        DeviceGetVgpuSchedulerState DeviceSetFanControlPolicy
        DeviceSetNvLinkDeviceLowPowerThreshold DeviceSetVgpuSchedulerState
        GetVgpuDriverCapabilities GpmMigSampleGet
        GpuInstanceCreateComputeInstanceWithPlacement
        GpuInstanceGetComputeInstancePossiblePlacements
    """,
    535: """
        DeviceGetConfComputeGpuAttestationReport DeviceGetConfComputeGpuCertificate
        DeviceGetConfComputeMemSizeInfo DeviceGetConfComputeProtectedMemoryUsage
        DeviceGetCurrentClocksEventReasons DeviceGetJpgUtilization DeviceGetModuleId
        DeviceGetOfaUtilization DeviceGetRunningProcessDetailList
        DeviceGetSupportedClocksEventReasons DeviceSetConfComputeUnprotectedMemSize
        DeviceSetPowerManagementLimit_v2 GpmQueryIfStreamingEnabled GpmSetStreamingEnabled
        SystemGetConfComputeCapabilities SystemGetConfComputeGpusReadyState
        SystemGetConfComputeState SystemGetNvlinkBwMode SystemSetConfComputeGpusReadyState
        SystemSetNvlinkBwMode
    """,
    545: """
        DeviceGetC2cModeInfoV DeviceGetLastBBXFlushTime
    """,
    550: """
        DeviceGetGpuFabricInfoV DeviceGetNumaNodeId DeviceGetPciInfoExt
        DeviceGetProcessesUtilizationInfo DeviceGetSramEccErrorStatus
        DeviceGetVgpuHeterogeneousMode DeviceGetVgpuInstancesUtilizationInfo
        DeviceGetVgpuProcessesUtilizationInfo DeviceGetVgpuTypeCreatablePlacements
        DeviceGetVgpuTypeSupportedPlacements DeviceSetVgpuCapabilities
        DeviceSetVgpuHeterogeneousMode SystemGetConfComputeKeyRotationThresholdInfo
        SystemGetConfComputeSettings SystemSetConfComputeKeyRotationThresholdInfo
        VgpuInstanceGetPlacementId VgpuTypeGetFbReservation VgpuTypeGetGspHeapSize
    """,
    555: """
        DeviceGetCapabilities DeviceGetClockOffsets DeviceGetDriverModel_v2
        DeviceSetClockOffsets
    """,
    560: """
        SystemGetDriverBranch VgpuTypeGetBAR1Info
    """,
    570: """
        DeviceGetCoolerInfo DeviceGetCurrentClockFreqs DeviceGetDramEncryptionMode
        DeviceGetFanSpeedRPM DeviceGetMarginTemperature DeviceGetNvlinkBwMode
        DeviceGetNvlinkSupportedBwModes DeviceGetPerformanceModes DeviceGetPlatformInfo
        DeviceGetTemperatureV DevicePowerSmoothingActivatePresetProfile
        DevicePowerSmoothingSetState DevicePowerSmoothingUpdatePresetProfileParam
        DeviceSetDramEncryptionMode DeviceSetNvlinkBwMode
        DeviceWorkloadPowerProfileClearRequestedProfiles
        DeviceWorkloadPowerProfileGetCurrentProfiles
        DeviceWorkloadPowerProfileGetProfilesInfo
        DeviceWorkloadPowerProfileSetRequestedProfiles VgpuInstanceGetRuntimeStateSize
    """,
    575: """
        DeviceGetHandleByUUIDV GpuInstanceGetActiveVgpus GpuInstanceGetCreatableVgpus
        GpuInstanceGetVgpuHeterogeneousMode GpuInstanceGetVgpuSchedulerLog
        GpuInstanceGetVgpuSchedulerState GpuInstanceGetVgpuTypeCreatablePlacements
        GpuInstanceSetVgpuHeterogeneousMode GpuInstanceSetVgpuSchedulerState
        SystemEventSetCreate SystemEventSetFree SystemEventSetWait SystemRegisterEvents
        VgpuTypeGetMaxInstancesPerGpuInstance
    """,
    580: """
        DeviceGetAddressingMode DeviceGetGpuInstanceProfileInfoByIdV DeviceGetNvLinkInfo
        DeviceGetPdi DeviceGetPowerMizerMode_v1 DeviceGetRepairStatus
        DeviceGetSramUniqueUncorrectedEccErrorCounts DeviceReadWritePRM_v1
        DeviceSetPowerMizerMode_v1
    """,
    590: """
        DeviceGetHostname_v1 DeviceGetUnrepairableMemoryFlag_v1 DeviceReadPRMCounters_v1
        DeviceSetHostname_v1 DeviceSetRusdSettings_v1
        DeviceWorkloadPowerProfileUpdateProfiles_v1
    """,
    595: """
        DeviceGetRemappedRows_v2 DeviceGetVgpuSchedulerLog_v2 DeviceGetVgpuSchedulerState_v2
        DeviceSetVgpuSchedulerState_v2 DeviceVgpuForceGspUnload
        GpuInstanceGetVgpuSchedulerLog_v2 GpuInstanceGetVgpuSchedulerState_v2
        GpuInstanceSetVgpuSchedulerState_v2
    """,
    610: """
        DeviceGetAccountingStats_v2 DeviceGetBBXTimeData_v1 SystemGetCPER_v1
    """,
    615: """
        DeviceGetAdaptiveTgpModeInfo_v1 DeviceGetBankRemapperStatus_v1
        DeviceGetGpuFabricInfo_v4 DeviceGetGpuUptime_v1 DeviceGetMemoryLimits_v1
        DeviceGetNvLinkInfo_v3 DeviceGetNvLinkTelemetrySamples_v1
        DeviceGetNvlinkNvlePrivateInfo_v1 DeviceGetNvlinkRemapTableInfo_v1
        DeviceLockNvlinkRemapTable_v1 DevicePerfMetricsGetSamples_v1
        DeviceSetAdaptiveTgpMode_v1 DeviceSetMemoryLimits_v1 DeviceSetNvlinkBwModeAsync_v1
        DeviceSetNvlinkNvleReady_v1 DeviceSetupNvlinkNvleEncryptionKey_v1
        EventSetGetContextCount_v1 EventSetGetContextData_v1 EventSetGetContextInfo_v1
        EventSetGetGpuOperationalEventContextLegacyXid_v1
        EventSetRegisterGpuOperationalEvents_v1 EventSetWait_v3
        SystemGetConfComputeSettings_v2
    """,
}

FIRST_BRANCH: Mapping[str, int] = MappingProxyType(
    {f"nvml{name}": branch for branch, names in _FIRST.items() for name in names.split()}
)

# CUDA 12.2.0 and 12.2.1 (535.54, 535.86): entries of 32 bytes, and no other list that has them.
DETAILS = "nvmlDeviceGetRunningProcessDetailList"
WIDE_BRANCH, WIDE_UNTIL = 535, 99


def missing_from(driver: str) -> frozenset[str]:
    """Return the functions that the library of a driver like `535.129.03` does not have."""
    branch = int(driver.partition(".")[0])
    missing = frozenset(name for name, first in FIRST_BRANCH.items() if first > branch)
    return missing | {DETAILS} if has_wide_entries(driver) else missing


def has_wide_entries(driver: str) -> bool:
    """Return whether version 3 of the process lists has entries of 32 bytes with this driver."""
    branch, release = (int(part) for part in driver.split(".")[:2])
    return branch == WIDE_BRANCH and release < WIDE_UNTIL
