# SPDX-License-Identifier: Apache-2.0
"""On a workstation somebody may work without asking: a claim takes such a user's cards last.

That costs a pass over all open files, which a command may take and a scheduler's hook may not.
"""

from __future__ import annotations

import os

from gpulock.alloc.choose import LATE, ClaimRequest
from gpulock.alloc.device_users import OpenFiles
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.context import Node
from gpulock.node.devices import lock_ids_overlap


def prefer_unused_cards(node: Node, want: ClaimRequest, pid: int) -> None:
    """Let a claim for process `pid` take the devices last that any other process has open.

    Where the request leaves no choice, nothing is read. A read that fails refuses nobody.
    """
    want.last = {}  # a caller who waits asks again with the same request
    try:
        taken = os.listdir(node.store.locks_dir)
    except OSError:
        taken = []
    free = [
        device
        for device in node.devices()
        if not (device.fault or device.withheld)
        and not any(lock_ids_overlap(device.id, name) for name in taken)
    ]
    if not 0 < want.count < len(free):
        return
    try:
        files = OpenFiles(ProcessScan(node.proc), free, node.settings)
        used = [device.id for device in free if set(files.pids_with_open(device.id)) - {pid}]
    except OSError:
        return
    want.last = dict.fromkeys(used, LATE)
