# SPDX-License-Identifier: Apache-2.0
"""The CDI spec of this node: what podman and Docker call its devices, and what those bring along.

Warm. A card is named by UUID, lock id and index, an instance by UUID and lock id. There is no
`all`: who was granted two devices names two. The names are no boundary (any user may name any
device), ISOLATION is. The format and its rules: SPEC.md and specs-go/version.go of
github.com/cncf-tags/container-device-interface.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from typing import Final, NotRequired, TypedDict

from gpulock.alloc.device_users import caps
from gpulock.daemon.core.background_call import Asking
from gpulock.daemon.core.journal import ERROR, Journal
from gpulock.daemon.reconcile.reconcile import Report
from gpulock.errors import BROKEN, UNKNOWN, Refusal, one_line
from gpulock.job.environment import CDI_KIND, driver_binds
from gpulock.node.context import Node
from gpulock.node.devices import MAJOR, Device
from gpulock.node.settings import Settings
from gpulock.store import atomic

# Names that begin with a digit and hostPath need 0.5.0; podman 4.3.1 takes nothing later.
VERSION: Final = "0.5.0"
NAME: Final = "gpulock.io-gpu.json"
CONTROL: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
DEV: Final = "/dev"  # inside a container
LIMIT: Final = 1 << 20  # bytes: 16 cards of 7 instances take a tenth
SECONDS: Final = 5.0  # DRIVER_DIR may be on a file server
_NAME: Final = re.compile("[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")


class DeviceNode(TypedDict):
    """One node; without numbers the runtime takes those of `hostPath` or `path`."""

    path: str
    hostPath: NotRequired[str]
    type: str
    major: NotRequired[int]
    minor: NotRequired[int]
    permissions: str


class Mount(TypedDict):
    """One bind."""

    hostPath: str
    containerPath: str
    options: list[str]


class Edits(TypedDict, total=False):
    """What is done to a container."""

    env: list[str]
    deviceNodes: list[DeviceNode]
    mounts: list[Mount]


class Named(TypedDict):
    """One name that `--device gpulock.io/gpu=NAME` takes."""

    name: str
    containerEdits: Edits


class Spec(TypedDict):
    """The file."""

    cdiVersion: str
    kind: str
    devices: list[Named]
    containerEdits: Edits


def spec(settings: Settings, found: Iterable[Device]) -> Spec:
    """Return the spec of the devices that can be granted.

    Raises Refusal(BROKEN) where DRIVER_DIR has no files of this node's driver. An instance whose
    access nodes the driver does not tell is left out: it could not be opened.
    """
    named: list[Named] = []
    for device in found:
        nodes = [] if device.fault else nodes_of(settings, device)
        if nodes:
            edits: Edits = {"deviceNodes": nodes}
            named += [Named(name=name, containerEdits=edits) for name in names(device)]
    return {
        "cdiVersion": VERSION,
        "kind": CDI_KIND,
        "devices": sorted(named, key=lambda entry: entry["name"]),
        "containerEdits": {
            # Images of CUDA say `all`, on which NVIDIA's own runtime would bring every card.
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "deviceNodes": [
                node_at(settings, name)
                for name in CONTROL
                if os.path.lexists(f"{settings.dev_root}/{name}")
            ],
            "mounts": mounts(driver_binds(settings)),
        },
    }


def names(device: Device) -> list[str]:
    """Return what a device is called; an instance has no index.

    One name that is none (before R470 the UUID of an instance had slashes) and the runtimes take
    nothing of the whole file.
    """
    told = [device.uuid, device.id, *([] if device.parent else [str(device.index)])]
    return [name for name in told if _NAME.fullmatch(name)]


def nodes_of(settings: Settings, device: Device) -> list[DeviceNode]:
    """Return the nodes a device needs besides the control nodes, none where they are not known."""
    own = node_at(settings, f"nvidia{device.minor}")
    own["major"], own["minor"] = MAJOR, device.minor
    if not device.parent:
        return [own]
    access = caps(device, settings.driver_root)
    return [own, *(node_at(settings, name) for name in access)] if access else []


def node_at(settings: Settings, name: str) -> DeviceNode:
    """Return one node below DEV_ROOT, with its numbers where it is there."""
    host = f"{settings.dev_root}/{name}"
    node: DeviceNode = {"path": f"{DEV}/{name}", "type": "c", "permissions": "rw"}
    if host != node["path"]:
        node["hostPath"] = host
    try:
        info = os.stat(host)
    except OSError:
        return node
    if stat.S_ISCHR(info.st_mode):
        node["major"], node["minor"] = os.major(info.st_rdev), os.minor(info.st_rdev)
    return node


def mounts(binds: str) -> list[Mount]:
    """Return the mounts of the driver's files, which nobody in a container may change."""
    pairs = [bind.split(":") for bind in binds.split(",") if bind]
    options = ["ro", "nosuid", "nodev", "bind"]
    return [{"hostPath": s, "containerPath": t, "options": options} for s, t in pairs]


def text_of(made: Spec) -> str:
    """Return the file's text; equal nodes make equal texts."""
    return json.dumps(made, indent=2) + "\n"


def path_of(settings: Settings) -> str:
    """Return where the spec is kept; raise Refusal(BROKEN) where that is not said."""
    if not settings.cdi_dir.startswith("/"):
        raise Refusal(BROKEN, "CDI_DIR names no folder", "set CDI_DIR=/var/run/cdi")
    return f"{settings.cdi_dir}/{NAME}"


def keep(settings: Settings, text: str) -> bool:
    """Have the spec in CDI_DIR say `text`; return whether it was written.

    Raises OSError, and Refusal(BROKEN) for a folder in which others than root can write: the
    runtimes of root obey what stands there.
    """
    path = path_of(settings)
    os.makedirs(settings.cdi_dir, 0o755, exist_ok=True)
    info = os.stat(settings.cdi_dir)
    if info.st_uid not in (0, os.geteuid()) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Refusal(
            BROKEN,
            f"{settings.cdi_dir} belongs to uid {info.st_uid}, mode {info.st_mode & 0o7777:04o}",
            "make it root's, writable by nobody else",
        )
    try:
        if atomic.read_text(path, LIMIT) == text:
            return False
    except (OSError, ValueError):
        pass  # whatever stands there
    atomic.replace_file(path, text.encode())
    return True


class CdiSpec:
    """The chore of gpulockd that keeps the spec; it waits for no file server."""

    def __init__(self, journal: Journal, patience: float = SECONDS) -> None:
        self._journal = journal
        self._patience = patience
        self._asking: Asking[str] | None = None

    def run(self, node: Node, report: Report, now: float) -> None:
        """Write the spec where it is not as the node is; say once what hinders it."""
        del report, now
        if not node.settings.cdi_dir:
            return
        hindered: dict[str, str] = {}
        try:
            keep(node.settings, self._text(node))
        except Refusal as refusal:
            hindered["cdi"] = one_line(f"no CDI spec: {refusal.why}; {refusal.do}")
        except OSError as fault:
            hindered["cdi"] = one_line(f"no CDI spec: {fault}")
        self._journal.stands("cdi", hindered, ERROR)

    def _text(self, node: Node) -> str:
        found = node.devices()
        late, self._asking = self._asking, None
        asking = late or Asking(lambda: text_of(spec(node.settings, found)))
        if not asking.wait(0.0 if late else self._patience):
            self._asking = asking
            raise Refusal(UNKNOWN, f"{node.settings.driver_dir} does not answer", "see its mount")
        return self._text(node) if late else asking.answer()  # a late answer is an old one
