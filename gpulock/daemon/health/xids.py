# SPDX-License-Identifier: Apache-2.0
"""Which XIDs speak of the card itself, so that no next job should get it.

From NVIDIA's XID catalogue (docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors with the
Xid Catalog", October 2025): those whose immediate action is a reset of the GPU, a restart of the
machine or a look at its mechanics, and the two workflows that end so (48, 74). What an
application does to itself (13, 31, 43, 45, 68, ...), what needs the application alone to be
restarted (94), and what is information (63, 92, 154) never puts a card out of service.
"""

from __future__ import annotations

from typing import Final

HARDWARE: Final = {
    46: "GPU stopped processing",
    48: "uncorrectable ECC error",
    54: "auxiliary power is not connected",
    62: "internal micro-controller halted",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained memory error",
    109: "context switch timed out",
    110: "security fault",
    119: "GSP does not answer",
    120: "GSP error",
    136: "NVLink training failed",
    140: "unrecovered ECC error",
    143: "GPU could not be initialised",
    155: "NVLink error defined by software",
    156: "resource retired",
    158: "GPU timed out for good",
}

# nvmlDeviceGpuRecoveryAction_t of nvml.h 13
ACTIONS: Final = {
    1: "a reset of the GPU",
    2: "a reboot of the node",
    3: "a drain of its peers",
    4: "a drain and a reset of the GPU",
    5: "a recovery of the IMEX domain",
    6: "a reset of its PCIe bus",
    7: "a reboot of the system",
}


def describe_recovery_action(number: int) -> str:
    """Return what the driver asks for, in words."""
    return ACTIONS.get(number, f"recovery action {number}")
