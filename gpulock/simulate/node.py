# SPDX-License-Identifier: Apache-2.0
"""Write a simulated node: `gpulock simulate DIR`."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gpulock.daemon.idle.command import why_untrusted_program
from gpulock.daemon.reconcile.inventory_file import format_inventory
from gpulock.node.procfs import Proc
from gpulock.simulate.driver import (
    FOLDER_MODE,
    Tree,
    device_tree,
    driver_tree,
    sys_tree,
    write_tree,
)
from gpulock.simulate.machine import Machine, list_machine_inventory
from gpulock.simulate.presets import PRESETS

MARKER = "simulation"
MARKER_LINE = "gpulock-simulation 1"
NVML = "nvml"  # what NVML would tell: the exporter's; gpulockd writes an `inventory` of its own
LISTEN = "127.0.0.1:9465"  # a simulation is nobody else's
LOCAL_MAJORS = range(240, 255)  # admin-guide/devices.txt: LOCAL/EXPERIMENTAL USE


class SimulationError(RuntimeError):
    """Say in one line why there is no simulated node, and what to do."""


class SimulatedNode:
    """A simulated node on disk. `machine` is the preset, cut to the GPUs asked for."""

    def __init__(self, directory: Path, machine: Machine) -> None:
        self.directory, self.machine = directory, machine
        self.config = directory / "gpulock.conf"  # for `gpulock --config`
        self.marker = directory / MARKER  # makes hooks accept another uid than root's
        self.driver_root = directory / "proc/driver/nvidia"
        self.sys_root, self.dev_root = directory / "sys", directory / "dev"
        self.lock_dir, self.state_dir = directory / "run/gpulock", directory / "state"
        self.exporter_dir = directory / "run/gpulock-exporter"  # an exporter makes it


def write_simulated_node(
    directory: Path, preset: str, gpus: int | None = None, for_scheduler: bool = False
) -> SimulatedNode:
    """Write the node `preset` with its first `gpus` GPUs below `directory`.

    A folder with anything in it is refused. `for_scheduler`: only the GPUs are simulated, for hooks
    that a real scheduler starts as root. No other user may then be able to change the folder or one
    above.
    """
    machine = PRESETS[preset]
    if gpus is not None:
        if gpus > len(machine.gpus):
            raise SimulationError(f"{preset} has 1 to {len(machine.gpus)} GPUs, not {gpus}")
        machine = machine.take(gpus)
    node = SimulatedNode(_prepare_node_folder(directory, for_scheduler), machine)
    inventory = format_inventory(list_machine_inventory(machine), Proc().boot_id()).encode()
    own: Tree = {
        MARKER: f"{MARKER_LINE}\nuid={os.geteuid()}\n".encode(),
        "run/gpulock/inventory": inventory,
        NVML: inventory,
        "state": None,
        "gpulock.conf": os.fsencode(format_node_config(node, for_scheduler)),
    }
    whole = driver_tree(machine) | sys_tree(machine) | device_tree(machine) | own
    try:
        write_tree(node.directory, whole)
    except OSError as fault:
        raise SimulationError(f"{directory}: {fault}; run it again elsewhere") from fault
    return node


def format_node_config(node: SimulatedNode, for_scheduler: bool = False) -> str:
    """Return gpulock.conf of a node. PROC_ROOT stays: the processes are real ones.

    A scheduler's jobs are real as well, so their locks are at the usual place.
    """
    machine = node.machine
    own = (
        f"LOCK_DIR={node.lock_dir}\n"
        f"STATE_DIR={node.state_dir}\n"
        f"EXPORTER_LISTEN={LISTEN}\n"
        f"SIMULATION={node.marker}\n"
    )
    return (
        f"# A simulated node, preset {machine.name}: {machine.summary}.\n"
        "# Written by `gpulock simulate`; removing its folder leaves nothing of it.\n"
        f"DRIVER_ROOT={node.driver_root}\n"
        f"SYS_ROOT={node.sys_root}\n"
        f"DEV_ROOT={node.dev_root}\n"
        + ("" if for_scheduler else own)
        + f"EXPECTED_GPUS={len(machine.gpus)}\n"
        + (f"SHARES={machine.shares}\n" if machine.shares else "")
    )


def make_device_nodes(node: SimulatedNode, devices: str = "/proc/devices") -> None:
    """Make device nodes of the files in `dev`, of a number that no driver has; raise OSError.

    slurmd takes no other file in gres.conf (docs/facts/slurm.md, positions). An open says ENXIO.
    """
    text, _, _ = Path(devices).read_text().partition("Block devices:")
    taken = {int(line.split()[0]) for line in text.splitlines()[1:] if line.strip()}
    major = next((number for number in LOCAL_MAJORS if number not in taken), LOCAL_MAJORS[0])
    files = sorted(path for path in node.dev_root.rglob("nvidia*") if path.is_file())
    for minor, path in enumerate(files):
        new = path.with_name(f"{path.name}.new")
        os.mknod(new, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        new.chmod(0o666)
        new.replace(path)


def _prepare_node_folder(directory: Path, for_scheduler: bool) -> Path:
    """Return the absolute folder, which is empty and the caller's.

    `for_scheduler`: the folders are looked at before one is made below them, and again once they
    lead nowhere else.
    """
    folder = directory.absolute()
    if not all(c.isprintable() or c > "\x7f" for c in str(folder)):
        raise SimulationError(f"{str(folder)!r} has a control character: take another name")
    try:
        if for_scheduler:
            _refuse_others_folder(next(path for path in folder.parents if path.exists()))
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
        if for_scheduler:
            _refuse_others_folder(folder.parent)
        if folder.stat().st_uid != os.geteuid():
            raise SimulationError(f"{folder} is not yours: take a folder of your own")
        if any(folder.iterdir()):
            raise SimulationError(f"{folder} is not empty: take a new folder, or remove this one")
        folder.chmod(FOLDER_MODE)
    except FileExistsError:
        raise SimulationError(f"{folder} is not a folder: take another name") from None
    except OSError as fault:
        raise SimulationError(f"{folder}: {fault}; take another folder") from fault
    return folder


def _refuse_others_folder(folder: Path) -> None:
    """Raise SimulationError where another user can change a folder or what leads to it."""
    if why := why_untrusted_program(folder, (0, os.geteuid())):
        raise SimulationError(f"{why}: hooks obey root's folders alone; take another folder")
