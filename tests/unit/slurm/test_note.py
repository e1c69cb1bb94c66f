# SPDX-License-Identifier: Apache-2.0
"""What a job's tasks are told: written whole, read by anybody, taken away by its own job alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpulock.errors import Refusal
from gpulock.slurm import note
from gpulock.slurm.note import TaskNote
from gpulock.store import atomic, kv
from tests.support.driver_reads import is_gate_held
from tests.support.slurm_site import OTHER_UID, RUN, UID, Site
from tests.support.trees import bus


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path)
    made.node().store.check(make=True)
    return made


def granted(site: Site, *numbers: int) -> TaskNote:
    found = TaskNote("n1", "12", UID, 1)
    found.token, found.binds = "feedface", "/d/bin:/nvbin,/d/lib:/nvlib"
    found.devices = [site.node().devices()[n] for n in numbers]
    found.positions = [str(n) for n in numbers]
    return found


def refused() -> TaskNote:
    found = TaskNote("n1", "12", UID, 0)
    found.refused, found.code = "gpulock: job 12: busy: a=b, c; try again", 213
    return found


def facts(found: TaskNote) -> list[object]:
    devices = [(d.id, d.bus, d.index, d.uuid, d.parent) for d in found.devices]
    about = [found.slurmd, found.job, found.uid, found.restart, found.token, found.binds]
    return [*about, found.positions, found.refused, found.code, devices]


def test_instances_and_unknown_uuids_are_read_as_they_were_written(site: Site) -> None:
    site.mig()
    site.gpu(bus(1), 1, "GPU-????????-????")
    written = granted(site, 0, 2, 1)
    note.write_task_note(site.node().store, written)
    found = site.note()
    assert facts(found) == facts(written)
    assert [d.parent for d in found.devices] == [bus(0), "", bus(0)]
    assert [d.uuid for d in found.devices] == ["MIG-1", "", "MIG-2"]


@pytest.mark.parametrize("made", [refused(), TaskNote("n1", "12", UID, 0)])
def test_a_refusal_and_nothing_asked_for_are_read_as_they_were_written(
    site: Site, made: TaskNote
) -> None:
    note.write_task_note(site.node().store, made)
    assert facts(site.note()) == facts(made)


def test_several_slurmd_of_one_machine_have_notes_of_their_own(site: Site) -> None:
    other = granted(site, 1)
    other.slurmd = "n2"
    note.write_task_note(site.node().store, granted(site, 0))
    note.write_task_note(site.node().store, other)
    assert site.note(12, "n2").devices[0].id == bus(1)
    note.remove_task_note(site.node().store, "n1", "12", UID, 1)
    assert site.notes() == ["n2.12"]


@pytest.mark.parametrize("field", ["binds", "refused", "token", "slurmd"])
@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\0b", "a\x1b[2J"])
def test_a_control_character_is_never_written(site: Site, field: str, text: str) -> None:
    made = granted(site, 0)
    setattr(made, field, text)
    with pytest.raises((kv.MalformedError, ValueError)):
        note.write_task_note(site.node().store, made)
    assert site.notes() == []


def test_no_note_is_none(site: Site) -> None:
    assert note.find_task_note(str(site.records), "n1", "12") is None
    assert note.find_task_note(str(site.root / "gone"), "n1", "12") is None
    note.remove_task_note(site.node().store, "n1", "12", UID, 0)


def other_version(text: str) -> str:
    return text.replace("gpulock-task 1", "gpulock-task 2")


def no_token(text: str) -> str:
    return text.replace("token=feedface\n", "")


def no_uid(text: str) -> str:
    return text.replace(f"uid={UID}", "uid=")


def fewer_indexes(text: str) -> str:
    return text.replace("indexes=0,1", "indexes=0")


def fewer_uuids(text: str) -> str:
    return text.replace("uuids=GPU-00000000-aaaa,", "uuids=")


def strange_index(text: str) -> str:
    return text.replace("indexes=0,1", "indexes=0,x")


def strange_code(text: str) -> str:
    return text.replace("code=0", "code=")


def twice(text: str) -> str:
    return f"{text}uid=0\n"


def nothing(text: str) -> str:
    return text[:0]


def half(text: str) -> str:
    return text[: text.index("=") - 2]


SPOILS = [
    other_version,
    no_token,
    no_uid,
    fewer_indexes,
    fewer_uuids,
    strange_index,
    strange_code,
    twice,
    nothing,
    half,
]


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_note_that_is_not_whole_is_malformed_and_any_epilog_may_remove_it(
    site: Site, spoil: Callable[[str], str]
) -> None:
    note.write_task_note(site.node().store, granted(site, 0, 1))
    path = site.records / "tasks/n1.12"
    assert spoil(path.read_text()) != path.read_text()
    path.write_text(spoil(path.read_text()))
    with pytest.raises(kv.MalformedError, match="not a task's note"):
        note.find_task_note(str(site.records), "n1", "12")
    note.remove_task_note(site.node().store, "n1", "12", OTHER_UID, 0)
    assert site.notes() == []


def test_an_epilog_compares_and_removes_where_no_prolog_writes_meanwhile(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a late one removes what the next run has written since it compared."""
    site.prolog(12, "0")
    remove = atomic.remove_quietly
    gate_held: list[bool] = []

    def stopped(path: str) -> None:
        if path.endswith("n1.12") and not gate_held:
            gate_held.append(is_gate_held(site.records))
        remove(path)

    monkeypatch.setattr(atomic, "remove_quietly", stopped)
    site.epilog(12)
    assert (site.notes(), gate_held) == ([], [True])


def test_a_prolog_writes_its_note_where_no_epilog_compares(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, gate_held = atomic.replace_file, list[bool]()

    def observed(path: str, *args: Any, **keys: Any) -> None:
        if path.endswith("n1.12"):
            gate_held.append(is_gate_held(site.records))
        replace(path, *args, **keys)

    monkeypatch.setattr(atomic, "replace_file", observed)
    site.prolog(12, "0")
    assert gate_held == [True]


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_what_is_no_file_is_not_read(site: Site, kind: str) -> None:
    note.write_task_note(site.node().store, granted(site, 0))
    path = site.records / "tasks/n1.12"
    path.rename(site.root / "real")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(site.root / "real")
    else:
        path.mkdir()
    with pytest.raises(OSError):
        note.find_task_note(str(site.records), "n1", "12")


@pytest.mark.parametrize(
    ("uid", "restart", "stays"),
    [
        (UID, 1, False),
        (UID, 2, False),
        (UID, 0, True),
        (OTHER_UID, 1, True),
        (OTHER_UID, 9, True),
    ],
)
def test_a_note_goes_with_its_own_user_and_this_run_or_a_later(
    site: Site, uid: int, restart: int, stays: bool
) -> None:
    note.write_task_note(site.node().store, granted(site, 0))
    note.remove_task_note(site.node().store, "n1", "12", uid, restart)
    assert site.notes() == (["n1.12"] if stays else [])


def test_a_note_that_names_fewer_devices_than_its_claim_starts_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path)
    assert site.prolog(12, "0,1") == RUN
    found = site.note()
    note.check_task_claim(site.node().store, found)
    found.devices.pop()
    with pytest.raises(Refusal, match="its claim has more devices"):
        note.check_task_claim(site.node().store, found)
