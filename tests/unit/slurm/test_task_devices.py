# SPDX-License-Identifier: Apache-2.0
"""Which of its job's devices one task sees, by Slurm's mask, its step's GPUs, and its rank."""

from __future__ import annotations

from typing import Optional

import pytest
from typing_extensions import TypeAlias

from gpulock.errors import INVALID_REQUEST, UNKNOWN
from gpulock.node.devices import Device
from gpulock.node.settings import Settings
from gpulock.slurm import task_devices
from gpulock.slurm.note import TaskNote
from gpulock.slurm.task_devices import Task
from tests.support.faults import refusal
from tests.support.slurm_site import UID
from tests.support.trees import bus


def note(*positions: str, uuids: bool = True) -> TaskNote:
    """Return the note of a job that holds a device a position: position 5 is index 105."""
    found = TaskNote("n1", "12", UID, 0)
    found.positions = list(positions)
    for position in positions:
        device = Device(bus(int(position)), 100 + int(position))
        device.uuid = f"GPU-{position}" if uuids else ""
        found.devices.append(device)
    return found


Seen: TypeAlias = tuple[Optional[list[int]], Optional[str]]


def see(found: TaskNote, environ: dict[str, str], step: str = "0", **keys: str) -> Seen:
    """Return the indexes of what a task sees, and Slurm's mask where it stands."""
    chosen, mask = task_devices.select_task_devices(
        Task(environ, step), found, Settings(dict(keys)), found.devices, []
    )
    return None if chosen is None else [device.index for device in chosen], mask


def mask(text: str, *positions: str, step: str = "0", **keys: str) -> Seen:
    return see(note(*positions), {"CUDA_VISIBLE_DEVICES": text}, step, **keys)


def confined(text: str, told: str, opened: str, *positions: str, denied: bool = False) -> Seen:
    """Return the same where the task may open the devices at some of its job's positions.

    A device cgroup has `denied` the others, or the modes of their nodes have.
    """
    found = note(*positions)
    mine = [found.devices[positions.index(place)] for place in opened.split(",") if place]
    rest = [device for device in found.devices if device not in mine] if denied else []
    task = Task({"CUDA_VISIBLE_DEVICES": text, "SLURM_STEP_GPUS": told}, "0")
    chosen, kept = task_devices.select_task_devices(task, found, Settings({}), mine, rest)
    return None if chosen is None else [device.index for device in chosen], kept


def ours(positions: list[str], environ: dict[str, str], step: str = "0", **keys: str) -> Seen:
    return see(note(*positions), environ, step, **{"SLURM_DEVICE_SELECTION": "gpulock", **keys})


@pytest.mark.parametrize(
    ("text", "positions", "expected"),
    [
        ("1,3", "13", ([101, 103], "1,3")),
        ("3", "13", ([103], "3")),
        ("3,1", "13", ([103, 101], "3,1")),
        ("0,1", "23", ([102, 103], "0,1")),  # counted from 0, in a device cgroup
        ("0-1", "23", ([102, 103], "0-1")),
        ("0", "23", (None, "0")),  # of either: the other one may be another step's
        ("GPU-1,GPU-3", "13", ([101, 103], "GPU-1,GPU-3")),
        ("GPU-3", "13", ([103], "GPU-3")),
        ("", "13", ([], None)),
    ],
)
def test_slurms_mask_stands_and_tells_the_devices(
    text: str, positions: str, expected: Seen
) -> None:
    assert mask(text, *positions) == expected


@pytest.mark.parametrize(
    ("text", "positions", "expected"),
    [
        ("1,3", "13", ([101, 103], None)),
        ("3", "13", ([103], None)),
        ("0", "01", ([100], "0")),  # these may be a device cgroup's own numbers
        ("0,1", "23", ([102, 103], "0,1")),
    ],
)
def test_uuids_take_the_place_of_positions_where_the_site_wants_them(
    text: str, positions: str, expected: Seen
) -> None:
    assert mask(text, *positions, VISIBLE_DEVICES="uuid") == expected


@pytest.mark.parametrize(
    "text",
    [
        *("2", "0,2", "5", "1,3,5", "7-9"),
        *("GPU-2", "GPU-1,GPU-2", "GPU-1,1", "1,GPU-1", "MIG-1"),
        *("x", "0,", "1\nexport A=b", "GPU-1\nexport A=b", "NoDevFiles"),
    ],
)
def test_a_mask_of_what_is_not_locked_is_refused(text: str) -> None:
    assert refusal(lambda: mask(text, "1", "3")).kind == UNKNOWN


def test_what_a_task_may_open_tells_the_devices_behind_a_mask_that_counts_from_0() -> None:
    """SLURM_STEP_GPUS of a bound task names another task's device there (facts/slurm.md)."""
    for told in ("1", "2", ""):
        assert confined("0", told, "2", "1", "2", "3") == ([102], "0")
        assert confined("0", told, "1", "1", "2", "3", denied=True) == ([101], "0")
    assert confined("0,1", "1,3", "1,3", "1", "2", "3", denied=True) == ([101, 103], "0,1")
    assert confined("0", "1", "1", "0", "1", denied=True) == ([101], "0")
    assert confined("3", "", "1,3", "1", "3") == ([103], "3")  # no device cgroup is at work


@pytest.mark.parametrize(
    ("text", "told", "opened"),
    [("0,1", "1,2", "2"), ("0", "1", "1,2"), ("0", "1", ""), ("2", "2", "1"), ("1", "1", "1,2")],
)
def test_devices_that_do_not_agree_with_the_mask_are_not_named(
    text: str, told: str, opened: str
) -> None:
    assert confined(text, told, opened, "1", "2", "3") == (None, text)


@pytest.mark.parametrize(
    ("text", "opened"),
    [("0", ""), ("2", ""), ("0,1", "2"), ("0-2", "1,3"), ("GPU-1", ""), ("GPU-1,GPU-2", "1")],
)
def test_a_mask_of_more_than_a_device_cgroup_opens_of_what_is_locked_is_refused(
    text: str, opened: str
) -> None:
    """Slurm has opened a device that this node has not locked: the map is stale."""
    found = refusal(lambda: confined(text, "1", opened, "1", "2", "3", denied=True))
    assert (found.kind, "other GPUs than are locked" in found.why) == (UNKNOWN, True)


def test_a_step_without_gpus_may_be_denied_all_devices_of_its_job() -> None:
    found = note("1", "3")
    for environ in ({}, {"CUDA_VISIBLE_DEVICES": ""}):
        task = Task(environ, "0")
        seen = task_devices.select_task_devices(task, found, Settings({}), [], found.devices)
        assert seen == ([], None)


def test_a_mask_that_contradicts_the_steps_positions_names_no_device() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0", "SLURM_STEP_GPUS": "1"}
    assert see(note("0", "1"), environ) == (None, "0")
    assert see(note("0", "1"), {**environ, "SLURM_STEP_GPUS": "0"}) == ([100], "0")
    assert see(note("0", "1"), environ, "batch") == ([100], "0")  # there it is the user's


def test_a_step_without_a_mask_asked_for_none_but_a_shell_has_all() -> None:
    assert see(note("1", "3"), {}) == ([], None)
    for step in ("batch", "interactive", "extern"):
        assert see(note("1", "3"), {}, step) == ([101, 103], None)


def test_without_uuids_slurms_mask_stands() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "3"}
    found = note("1", "3", uuids=False)
    assert see(found, environ, VISIBLE_DEVICES="uuid") == ([103], "3")


def test_a_step_with_another_jobs_gpus_is_refused() -> None:
    found = refusal(lambda: ours(["1", "3"], {"SLURM_STEP_GPUS": "2"}))
    assert (found.kind, "1,3" in found.why) == (UNKNOWN, True)


@pytest.mark.parametrize("step", ["batch", "interactive", "extern", "", "0+1", "x"])
def test_what_a_batch_script_exports_is_not_believed(step: str) -> None:
    """slurmstepd sets SLURM_STEP_GPUS in a step alone (facts/slurm.md, environment of a task)."""
    for forged in ("31337", "3", "x\n", "0-"):
        assert ours(["1", "3"], {"SLURM_STEP_GPUS": forged}, step) == ([101, 103], None)


@pytest.mark.parametrize("selection", ["slurm", "gpulock"])
@pytest.mark.parametrize("step", ["0", "batch"])
@pytest.mark.parametrize("count", ["1", "2", "3", "10", "x", ""])
def test_a_task_that_slurm_gave_another_number_than_is_locked_is_refused(
    selection: str, step: str, count: str
) -> None:
    """Of a job with several types of GPU the Prolog is told one type's alone."""
    environ = {"SLURM_GPUS_ON_NODE": count, "CUDA_VISIBLE_DEVICES": "1,3", "SLURM_STEP_GPUS": "1,3"}
    if count in ("3", "10") or (count, step) == ("1", "batch"):
        found = refusal(
            lambda: see(note("1", "3"), environ, step, SLURM_DEVICE_SELECTION=selection)
        )
        kind = UNKNOWN if count == "1" else INVALID_REQUEST
        assert (found.kind, f"gave {count} GPUs" in found.why) == (kind, True)
    else:
        seen, _ = see(note("1", "3"), environ, step, SLURM_DEVICE_SELECTION=selection)
        assert seen == [101, 103]


@pytest.mark.parametrize(
    ("bound", "on_node", "expected"),
    [("1,2", "4", [101, 102]), ("3", "4", [103]), ("0-3", "4", [100, 101, 102, 103])],
)
def test_a_task_sees_what_slurm_bound_to_it(bound: str, on_node: str, expected: list[int]) -> None:
    """With --gpus-per-task each task has its own SLURM_STEP_GPUS, fewer than are on the node."""
    told = {"SLURM_GPUS_ON_NODE": on_node, "SLURM_STEP_GPUS": bound}
    assert ours(["0", "1", "2", "3"], told) == (expected, None)
