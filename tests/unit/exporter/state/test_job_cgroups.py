# SPDX-License-Identifier: Apache-2.0
"""What a job used of its host is what the kernel counted in its own cgroup, or not known."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
from gpulock_exporter.state.job_cgroups import HostUsage, JobCgroups

from gpulock.isolation import marks
from gpulock.isolation.tree import cgroup_name
from gpulock.store import atomic
from gpulock.store.owner import Owner
from tests.support.exporter_nodes import Node, card, facts, lock
from tests.support.faults import raising
from tests.support.trees import Box, bus, record

GIB = 1 << 30
TOKEN = "feed"


class Host(Box):
    """A host with cgroups, and a reader of them that is asked once a second."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.cgroups = root / "sys/fs/cgroup"
        self.cgroups.mkdir(parents=True)
        self.reader = JobCgroups(self.node())
        self.now = 100.0

    def write(self, folder: str, **files: str) -> Path:
        """Write files of a cgroup; `_` in a name is a dot but for `usage_usec`."""
        place = self.cgroups / folder
        place.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (place / name.replace("__", ".")).write_text(f"{text}\n")
        return place

    def read(self, owner: Owner, seconds: float = 1.0) -> HostUsage:
        """Return what is known of a claim a while later."""
        self.now += seconds
        return self.reader.read({TOKEN: owner}, self.now).get(TOKEN, HostUsage())


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def job(**about: Any) -> Owner:
    return record(**{"scheduler": "slurm", "slurmd": "n1", "job_id": "12", "uid": 1000, **about})


def version_2(host: Host, folder: str, seconds: float = 3.5) -> Path:
    return host.write(
        folder,
        cpu__stat=f"usage_usec {seconds * 1e6:.0f}\nuser_usec 1\nsystem_usec 1",
        memory__peak=str(2 * GIB),
        memory__max=str(8 * GIB),
        cpuset__cpus__effective="0-3,8",
    )


def test_a_slurm_job_of_version_1_is_known_by_four_controllers(host: Host) -> None:
    path = "slurm/uid_1000/job_12"
    host.write(f"cpuacct/{path}", cpuacct__usage="3500000000")
    host.write(
        f"memory/{path}",
        memory__max_usage_in_bytes=str(2 * GIB),
        memory__limit_in_bytes=str(8 * GIB),
    )
    host.write(f"cpuset/{path}", cpuset__cpus="0-1")
    assert host.read(job()) == HostUsage(3.5, 2, 2 * GIB, 8 * GIB)


@pytest.mark.parametrize("name", ["job_12", "s5K1AB2CD3EF4G"])
def test_a_slurm_job_of_version_2_is_known_by_its_number_or_its_sluid(
    host: Host, name: str
) -> None:
    version_2(host, f"system.slice/slurmstepd.scope/{name}")
    assert host.read(job(sluid="s5K1AB2CD3EF4G")) == HostUsage(3.5, 5, 2 * GIB, 8 * GIB)


def test_a_confined_job_of_grid_engine_is_known_by_the_cgroup_that_confines_it(host: Host) -> None:
    owner = record(scheduler="sge", job_id="7", task_id="", pid=42, start=99)
    node = host.node()
    node.store.check(make=True)
    outer = f"{host.cgroups}/system.slice/execd.service"
    marks.note_cgroup_folders(node.store, [outer])
    version_2(host, f"system.slice/execd.service/{cgroup_name('7.1', 42, 99)}")
    assert host.read(owner).cpu_seconds == 3.5


def test_a_job_that_systemd_keeps_is_known_by_its_unit(host: Host) -> None:
    version_2(host, "ocs-jobs.slice/ocs-7.1.scope")
    owner = record(scheduler="sge", job_id="7", scope="/ocs-jobs.slice/ocs-7.1.scope")
    assert host.read(owner).cpu_seconds == 3.5


@pytest.mark.parametrize("scheduler", ["slurm", "sge", "process", "admin"])
def test_a_job_without_a_cgroup_of_its_own_used_what_nobody_knows(
    host: Host, scheduler: str
) -> None:
    version_2(host, "system.slice/slurmstepd.scope/job_13")
    assert host.read(job(scheduler=scheduler)) == HostUsage()


def test_no_limit_is_no_number_and_what_is_missing_is_not_known(host: Host) -> None:
    folder = "system.slice/slurmstepd.scope/job_12"
    host.write(folder, memory__peak="17", memory__max="max")
    assert host.read(job()) == HostUsage(None, None, 17, None)
    host.write("memory/slurm/uid_1000/job_13", memory__limit_in_bytes="9223372036854771712")
    host.write("cpuacct/slurm/uid_1000/job_13", cpuacct__usage="0")
    assert host.read(job(job_id="13")) == HostUsage(None, None, 17, None), "one claim, one reading"
    assert host.reader.read({"other": job(job_id="13")}, host.now) == {"other": HostUsage(0.0)}


def test_before_linux_5_19_the_peak_is_the_most_that_was_seen(host: Host) -> None:
    folder = "system.slice/slurmstepd.scope/job_12"
    peaks: list[int | None] = []
    for now in (5, 90, 20):
        host.write(folder, memory__current=str(now))
        peaks.append(host.read(job()).host_memory_peak)
    assert peaks == [5, 90, 90]


def test_steps_that_follow_each_other_add_up(host: Host) -> None:
    folder = "system.slice/slurmstepd.scope/job_12"
    version_2(host, folder, 3.0)
    assert host.read(job()).cpu_seconds == 3.0
    shutil.rmtree(host.cgroups / folder)
    assert host.read(job()).cpu_seconds == 3.0, "the cgroup is gone, what it counted is not"
    version_2(host, folder, 2.0)
    assert host.read(job()).cpu_seconds == 5.0
    version_2(host, folder, 0.5)  # gone and made again between two readings
    assert host.read(job()).cpu_seconds == 5.5
    kept = (host.cgroups / folder).rename(host.cgroups / "kept")  # so that its inode is not reused
    version_2(host, folder, 9.0)
    assert host.read(job()).cpu_seconds == 14.5, "another cgroup, whatever it counted"
    assert kept.exists()


@pytest.mark.parametrize("memory", [True, False])
def test_a_tick_without_descriptors_counts_nothing_twice(
    host: Host, monkeypatch: pytest.MonkeyPatch, memory: bool
) -> None:
    place = version_2(host, "system.slice/slurmstepd.scope/job_12", 100.0)
    if not memory:  # as on Grid Engine, whose cgroup counts processor time alone
        (place / "memory.peak").unlink()
    assert host.read(job()).cpu_seconds == 100.0
    with monkeypatch.context() as broken:
        broken.setattr(atomic, "read_text", raising(OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(OSError, match="Too many"):
            host.read(job())
    assert host.read(job()).cpu_seconds == 100.0
    version_2(host, "system.slice/slurmstepd.scope/job_12", 101.0)
    assert host.read(job()).cpu_seconds == 101.0


def test_a_job_that_cannot_be_read_now_keeps_no_other_from_being_read(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = {f"{number:016x}": job(job_id=str(number)) for number in (12, 13)}
    for number in (12, 13):
        version_2(host, f"system.slice/slurmstepd.scope/job_{number}", number)
    real = atomic.read_text

    def read_text(path: str, *limits: int) -> str:
        if "job_12" in path:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *limits)

    with monkeypatch.context() as broken:
        broken.setattr(atomic, "read_text", read_text)
        with pytest.raises(OSError, match="Input/output"):
            host.reader.read(owners, host.now)
    (place := host.cgroups / "system.slice/slurmstepd.scope/job_13/cpu.stat").unlink()
    place.parent.rename(place.parent.with_name("over"))
    used = host.reader.read(owners, host.now + 1)
    assert [one.cpu_seconds for one in used.values()] == [12.0, 13.0]


def test_a_peak_that_comes_later_is_told_from_then_on(host: Host) -> None:
    folder = "system.slice/slurmstepd.scope/job_12"
    host.write(folder, cpu__stat="usage_usec 1", memory__current="5")
    assert host.read(job()).host_memory_peak == 5
    host.write(folder, memory__peak="70")
    assert host.read(job()).host_memory_peak == 70


def test_a_cgroup_of_slurm_that_comes_late_is_seen_within_two_seconds(host: Host) -> None:
    for _ in range(60):
        assert host.read(job()) == HostUsage()
    version_2(host, "system.slice/slurmstepd.scope/job_12")
    found = [host.read(job()).cpu_seconds for _ in range(3)]
    assert 3.5 in found


def test_a_cgroup_that_is_not_there_is_searched_for_more_and_more_seldom(host: Host) -> None:
    found: list[float] = []
    node = host.node()

    class Counting(Owner):
        """Tell when somebody asks for its scheduler: that is a search."""

        @property
        def scheduler(self) -> str:  # type: ignore[override]
            found.append(host.now)
            return "admin"

    owner = Counting.__new__(Counting)
    reader = JobCgroups(node)
    for _ in range(200):
        host.now += 1
        reader.read({TOKEN: owner}, host.now)
    searches = sorted(set(found))
    gaps = [round(b - a) for a, b in zip(searches, searches[1:])]
    assert gaps[:6] == [1, 2, 4, 8, 16, 32] and set(gaps[6:]) == {32}


def test_a_claim_that_ends_keeps_what_its_job_used_and_a_new_exporter_never_takes_less() -> None:
    node = Node()
    node.facts = facts(lock(0, TOKEN))
    node.facts.host_usage = {TOKEN: HostUsage(3.5, 4, GIB, 2 * GIB)}
    node.tick(card())
    node.facts.host_usage = {TOKEN: HostUsage(1.0, None, 5, None)}  # of a second cgroup
    node.tick(card())
    node.facts = facts()
    over = node.tick(card())[TOKEN][bus(0)]
    told = (over.cpu_seconds, over.cpus, over.host_memory_peak, over.host_memory)
    assert told == (3.5, 4, GIB, 2 * GIB)
