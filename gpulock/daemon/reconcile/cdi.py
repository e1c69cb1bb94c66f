# SPDX-License-Identifier: Apache-2.0
"""The CDI spec of a node without NVIDIA's: what podman and Docker call its devices.

Warm. A device has one name, its lock id, which $GPULOCK_CDI says. There is no `all`: who was
granted two devices names two. The names are no boundary (any user may name any device), ISOLATION
is. The format and its rules: SPEC.md of github.com/cncf-tags/container-device-interface.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from gpulock.alloc.device_users import mig_access_nodes
from gpulock.daemon.core.background_call import NoAnswerError, PatientCaller
from gpulock.daemon.core.journal import ERROR, DaemonJournal
from gpulock.daemon.reconcile.reconcile import Chore, ReconcileReport
from gpulock.errors import BROKEN, Refusal
from gpulock.job.environment import CDI_KIND, driver_binds
from gpulock.node.context import Node
from gpulock.node.devices import Device
from gpulock.node.settings import Settings
from gpulock.store import atomic

# Names that begin with a digit and hostPath need 0.5.0; podman 4.3.1 takes nothing later.
VERSION: Final = "0.5.0"
SPEC_NAME: Final = "gpulock.io-gpu.json"
CONTROL: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
LIMIT: Final = 1 << 20  # bytes: 16 cards of 7 instances take a tenth
SECONDS: Final = 5.0  # DRIVER_DIR may be on a file server


def format_cdi_spec(settings: Settings, listed: Iterable[Device]) -> str:
    """Return the spec of the devices that can be granted; equal nodes make equal texts.

    Raises Refusal(BROKEN) where DRIVER_DIR has no files of this node's driver. An instance whose
    access nodes the driver does not tell is left out: it could not be opened.
    """
    top = settings.dev_root
    devices: list[dict[str, object]] = []
    for device in sorted(listed, key=lambda one: one.id):
        access = mig_access_nodes(device, settings.driver_root) if device.parent else []
        if not (device.fault or device.withheld) and bool(access) == bool(device.parent):
            nodes = cdi_nodes(top, [f"nvidia{device.minor}", *access])
            devices.append({"name": device.id, "containerEdits": {"deviceNodes": nodes}})
    control = [name for name in CONTROL if os.path.lexists(f"{top}/{name}")]
    binds = [bind.split(":") for bind in driver_binds(settings).split(",") if bind]
    options = ["ro", "nosuid", "nodev", "bind"]  # nobody in a container may change them
    edits = {
        # Images of CUDA say `all`, on which NVIDIA's own runtime would bring every card.
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        "deviceNodes": cdi_nodes(top, control),
        "mounts": [{"hostPath": h, "containerPath": c, "options": options} for h, c in binds],
    }
    spec = {"cdiVersion": VERSION, "kind": CDI_KIND, "devices": devices, "containerEdits": edits}
    return json.dumps(spec, indent=2) + "\n"


def cdi_nodes(top: str, names: Iterable[str]) -> list[dict[str, str]]:
    """Return device nodes of DEV_ROOT; a runtime reads their numbers itself."""
    return [{"path": f"/dev/{n}", "hostPath": f"{top}/{n}", "permissions": "rw"} for n in names]


def update_cdi_spec(settings: Settings, text: str) -> None:
    """Have the spec in CDI_DIR say `text`.

    Raises OSError, and Refusal(BROKEN) for a folder in which others than root can write: the
    runtimes of root obey what stands there.
    """
    path = f"{settings.cdi_dir}/{SPEC_NAME}"
    os.makedirs(settings.cdi_dir, 0o755, exist_ok=True)
    info = os.stat(settings.cdi_dir)
    if info.st_uid not in (0, os.geteuid()) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Refusal(
            BROKEN,
            f"{settings.cdi_dir} belongs to uid {info.st_uid}, mode {info.st_mode & 0o7777:04o}",
            "make it root's, writable by no other user",
        )
    with suppress(OSError):  # whatever stands there
        if atomic.read_text(path, LIMIT) == text:
            return
    atomic.replace_file(path, text.encode())


class CdiSpecWriter(Chore):
    """The chore of gpulockd, or of `gpulock reap`, that keeps the spec; it waits for no server."""

    def __init__(self, journal: DaemonJournal) -> None:
        self._journal = journal
        self._caller = PatientCaller[str](SECONDS)

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Write the spec where it is not as the node is; say once what hinders it."""
        if not node.settings.cdi_dir:
            return
        hindered, settings = "", node.settings
        try:
            devices = node.devices()
            text = self._caller.ask(lambda: format_cdi_spec(settings, devices))
            update_cdi_spec(settings, text)
        except NoAnswerError:
            hindered = f"{settings.driver_dir} does not answer; see its mount"
        except Refusal as refusal:
            hindered = f"{refusal.why}; {refusal.do}"
        except OSError as fault:
            hindered = str(fault)
        self._journal.log_state("cdi", hindered and f"no CDI spec: {hindered}", ERROR)
