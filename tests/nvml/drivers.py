# SPDX-License-Identifier: Apache-2.0
"""With which release branch of the driver a function first came that gpulock calls.

Found by comparing the headers of CUDA 11.0 to 13.3, as go-nvml's history has them, and the branch
that each CUDA came with. What came with MIG (450) is that of CUDA 11.0 which serves MIG and A100.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_FIRST = {
    450: """DeviceGetComputeInstanceId DeviceGetGpuInstanceId DeviceGetMaxMigDeviceCount
        DeviceGetMigDeviceHandleByIndex DeviceGetMigMode""",
    455: "DeviceGetComputeRunningProcesses_v2 DeviceGetGraphicsRunningProcesses_v2",
    470: """DeviceGetMPSComputeRunningProcesses DeviceGetMPSComputeRunningProcesses_v2
        DeviceGetNvLinkRemoteDeviceType""",
    510: """DeviceGetComputeRunningProcesses_v3 DeviceGetGraphicsRunningProcesses_v3
        DeviceGetMPSComputeRunningProcesses_v3 DeviceGetMemoryInfo_v2""",
    520: "GpmMetricsGet GpmQueryDeviceSupport GpmSampleAlloc GpmSampleFree GpmSampleGet",
    525: "DeviceGetGpuFabricInfo GpmMigSampleGet",
    535: "DeviceGetCurrentClocksEventReasons DeviceGetRunningProcessDetailList",
    550: "DeviceGetGpuFabricInfoV DeviceGetNumaNodeId",
    570: "DeviceGetTemperatureV",
    580: "DeviceGetAddressingMode",
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
