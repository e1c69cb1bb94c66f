# SPDX-License-Identifier: Apache-2.0
"""What a job's tasks are told: written whole, read by anybody, taken away by its own job alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpulock.errors import Refusal
from gpulock.slurm import note
from gpulock.slurm.note import TaskNote
from gpulock.store import atomic, kv
from tests.support.driver_reads import is_gate_held
from tests.support.locks import write_record
from tests.support.slurm_site import OTHER_UID, RUN, UID, Site


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


# what stands in a note, and what does instead
SPOILS = (
    ("gpulock-task 1", "gpulock-task 2"),
    ("token=feedface\n", ""),
    (f"uid={UID}", "uid="),
    ("indexes=0,1", "indexes=0"),
    ("uuids=GPU-00000000-aaaa,", "uuids="),
    ("indexes=0,1", "indexes=0,x"),
    ("code=0", "code="),
    ("code=0\n", "code=0\nuid=0\n"),  # one key twice
    ("(?s).+", ""),
    ("(?s)=.+", ""),  # cut short
)


@pytest.mark.parametrize(("old", "new"), SPOILS)
def test_a_note_that_is_not_whole_is_malformed_and_any_epilog_may_remove_it(
    site: Site, old: str, new: str
) -> None:
    note.write_task_note(site.node().store, granted(site, 0, 1))
    path = site.records / "tasks/n1.12"
    spoiled = re.sub(old, new, path.read_text(), count=1)
    assert spoiled != path.read_text()
    path.write_text(spoiled)
    with pytest.raises(kv.MalformedError, match="not a task's note"):
        note.find_task_note(str(site.records), "n1", "12")
    note.remove_task_note(site.node().store, TaskNote("n1", "12", OTHER_UID, 0), set())
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


@pytest.mark.parametrize(
    ("uid", "restart", "stays"), [(UID, 1, False), (UID, 0, True), (OTHER_UID, 9, True)]
)
def test_a_note_goes_with_its_own_user_and_this_run_or_a_later(
    site: Site, uid: int, restart: int, stays: bool
) -> None:
    note.write_task_note(site.node().store, granted(site, 0))
    note.remove_task_note(site.node().store, TaskNote("n1", "12", uid, restart), set())
    assert site.notes() == (["n1.12"] if stays else [])


def test_a_note_that_names_fewer_devices_than_its_claim_starts_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path)
    assert site.prolog(12, "0,1") == RUN
    found = site.note()
    note.check_task_claim(site.node().store, found)
    assert [device.minor for device in found.devices] == [0, 1]
    write_record(site.node().store, site.holder(0).copy(minors=("", "1")))
    note.check_task_claim(site.node().store, found)
    assert [device.minor for device in found.devices] == [-1, 1], "it opens no card"
    found.devices.pop()
    with pytest.raises(Refusal, match="its claim has more devices"):
        note.check_task_claim(site.node().store, found)
