# SPDX-License-Identifier: Apache-2.0
"""Which of its job's devices one task sees: a pure function.

Hot. Where Slurm chooses, its own CUDA_VISIBLE_DEVICES stands: under a device cgroup it counts
from 0, with a binding it differs from task to task, and what the task may open tells which devices
are behind it (docs/facts/slurm.md, device constraint and binding). Where gpulock chooses, a step
that asked for some of the job's GPUs gets those.
"""

from gpulock.errors import INVALID_REQUEST, UNKNOWN, Refusal
from gpulock.node.devices import Device
from gpulock.node.settings import Settings
from gpulock.slurm.call import expand_gpu_list, is_slurm_number
from gpulock.slurm.note import TaskNote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

MASK = "CUDA_VISIBLE_DEVICES"


class Task:
    """One task as slurmstepd describes it.

    `is_step` is false for a batch script and an interactive shell, of which SLURM_STEP_GPUS may
    be the user's own. `on_node` is how many GPUs Slurm gave it here, 0 where it does not say.
    """

    def __init__(self, environ: "Mapping[str, str]", step: str) -> None:
        self.is_step = is_slurm_number(step)
        self.mask = environ.get(MASK)
        listed = environ.get("SLURM_STEP_GPUS", "") if self.is_step else ""
        self.positions = expand_gpu_list(listed) if listed else []
        listed = environ.get("SLURM_GPUS_ON_NODE", "")
        self.on_node = int(listed) if is_slurm_number(listed) else 0


def select_task_devices(
    task: Task, own: TaskNote, settings: Settings, opened: list[Device], denied: list[Device]
) -> "tuple[list[Device] | None, str | None]":
    """Return (the task's devices, Slurm's mask where it stands or None); raise Refusal.

    `opened` are those of the job's devices that the task may open, `denied` those that a device
    cgroup keeps from it. The devices are None where they cannot be told: then only Slurm's mask is
    right. Of a job with several types of GPU Slurm tells the Prolog one type's alone: what was
    locked is then too little, and would be so the next time.
    """
    is_known = task.positions or not task.is_step  # else the number is of the batch script's node
    more = task.on_node > len(own.devices)
    if is_known and (more or (not task.is_step and 0 < task.on_node < len(own.devices))):
        raise Refusal(
            INVALID_REQUEST if more else UNKNOWN,
            f"Slurm gave {task.on_node} GPUs on this node, but its Prolog saw {len(own.devices)}",
            "ask for one type of GPU a job (see docs/slurm.md)",
        )
    if settings.slurm_device_selection == "slurm":
        return select_by_slurm_mask(task, own, settings, opened, denied)
    if task.is_step and own.positions:
        return devices_at_positions(own, task.positions), None  # none for `srun --gres=none`
    return own.devices, None


def select_by_slurm_mask(
    task: Task, own: TaskNote, settings: Settings, opened: list[Device], denied: list[Device]
) -> "tuple[list[Device] | None, str | None]":
    """Return the devices behind Slurm's mask as far as they can be told, and that mask.

    Raises Refusal when the mask names what this node did not lock for the job. Under a device
    cgroup a mask counts from 0: there it may name no more than the locked ones that are not denied.
    """
    if task.mask is None:  # `srun --gres=none`, or a shell for which Slurm set nothing
        return ([], None) if task.is_step else (own.devices, None)
    entries = expand_gpu_list(task.mask) if task.mask else []
    if not entries:
        return [], None
    if denied and len(entries) > len(own.devices) - len(denied):
        raise Refusal(
            UNKNOWN,
            f"Slurm opened other GPUs than are locked: of those {len(denied)} are denied",
            "run gpulock doctor on the node",
        )
    if entries[0].startswith(("GPU-", "MIG-")):
        chosen = [d for d in own.devices if d.uuid in entries]
        if len(chosen) != len(entries):
            raise mask_mismatch_refusal(task, own)
        return chosen, task.mask
    by_position = set(entries) <= set(own.positions)
    counted = entries == index_strings(len(entries))  # perhaps a device cgroup's own numbers
    if not by_position and not set(entries) <= set(index_strings(len(own.devices))):
        raise mask_mismatch_refusal(task, own)
    named = devices_at_positions(own, entries) if by_position else None
    if len(opened) < len(own.devices):  # a device cgroup is at work
        if named is None or set(named) != set(opened):
            named = opened if counted and len(entries) == len(opened) else None
        return named, task.mask
    if named is not None and (not task.positions or set(task.positions) == set(entries)):
        by_uuid = settings.visible_devices == "uuid" and all([d.uuid for d in named])
        return named, None if by_uuid and not counted else task.mask
    return own.devices if len(entries) == len(own.devices) else None, task.mask


def mask_mismatch_refusal(task: Task, own: TaskNote) -> Refusal:
    """Return the refusal for a mask that contradicts the lock."""
    return Refusal(
        UNKNOWN,
        f"Slurm's mask {task.mask} is not what is locked ({','.join(own.positions)})",
        "run gpulock doctor on the node",
    )


def index_strings(count: int) -> list[str]:
    """Return 0, 1, ... as texts."""
    return [str(n) for n in range(count)]


def devices_at_positions(own: TaskNote, positions: list[str]) -> list[Device]:
    """Return the devices that stand for Slurm's positions; raise Refusal for another's."""
    if not set(positions) <= set(own.positions):
        raise Refusal(
            UNKNOWN,
            f"the step has {','.join(positions)} of Slurm, its job {','.join(own.positions)}",
            "run gpulock doctor on the node",
        )
    return [own.devices[own.positions.index(p)] for p in positions]
