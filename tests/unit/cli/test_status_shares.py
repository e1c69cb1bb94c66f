# SPDX-License-Identifier: Apache-2.0
"""`gpulock status` of a GPU with several holders: each in one look, with its part and its work."""

from __future__ import annotations

import re

import pytest

from gpulock.store.verdicts import Verdict
from tests.support.cli_site import Site
from tests.support.locks import place_lock
from tests.support.samples import GIB, Sampled

HOUR = 3600.0


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


def share(
    site: Site, job: str, user: str, *places: int, parted: int = 4, scheduler: str = "sge"
) -> None:
    """Let a job have places of the third GPU."""
    ids = tuple(f"{site.id(2)}.share{number}" for number in places)
    more = {"devices": ids, "places": parted, "scheduler": scheduler}
    record = site.hold(job_id=job, user=user, token=f"t{job}", **more)
    for name in ids:
        place_lock(site.node().store, name, record)


def card_lines(site: Site, *words: str) -> list[str]:
    """Return the table's lines of the third GPU: from its state on, a blank between two cells.

    It is held for 0 s, whatever a busy machine makes of that.
    """
    shown = re.sub(r" [1-5]?[0-9]s\b", " 0s", site.call("status", *words).stdout)
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    first = next(number for number, line in enumerate(lines) if line.startswith("2 0000:"))
    last = next(n for n, line in enumerate(lines) if n > first and line.startswith(("3 ", "8 ")))
    return [lines[first].partition("32GB ")[2], *lines[first + 1 : last]]


def test_each_holder_has_one_line_with_its_part_of_the_gpu(site: Site) -> None:
    assert "SHARE" not in site.call("status").stdout
    share(site, "12", "alice", 1, 2)
    share(site, "13", "bob", 3, parted=0)  # that nobody counts
    assert card_lines(site) == ["held 12 alice gpu.q 2/4 0s", "13 bob gpu.q 1/? 0s"]
    title, whole = site.call("status").stdout.splitlines()[:2]
    assert title.split()[-4:] == ["QUEUE", "SHARE", "HELD", "FOR"]
    assert whole.split()[-1] == "free"


def test_each_holder_has_its_own_work_and_the_card_has_its_own(
    site: Site, sampled: Sampled
) -> None:
    share(site, "12", "alice", 1, 2)
    share(site, "13", "bob", 3)
    sampled.device(site.id(2), utilization=0.75, memory_used=12 * GIB)
    for place in (1, 2):  # a claim of several places has the same on each
        sampled.claim("t12", f"{site.id(2)}.share{place}", busy=50.0, last_busy=sampled.now)
    sampled.claim("t13", f"{site.id(2)}.share3", busy=10.0, last_busy=sampled.now - HOUR)
    sampled.write()
    assert card_lines(site) == [
        "held 12 alice gpu.q 2/4 0s 75% 50% 12/32 now",
        "13 bob gpu.q 1/4 0s 10% 1h00m ago",
    ]


def test_a_holder_in_another_state_than_the_gpu_says_so(site: Site) -> None:
    share(site, "12", "alice", 1, scheduler="slurm")
    share(site, "13", "bob", 2, scheduler="slurm")
    site.publish(t12=Verdict("alive", "it runs"), t13=Verdict("unknown", "nobody sees it"))
    assert card_lines(site) == ["unknown 13 bob gpu.q 1/4 0s", "held 12 alice gpu.q 1/4 0s"]


def idle_shares(site: Site, sampled: Sampled, *seconds: float) -> None:
    """Let jobs share the third GPU, each idle for so long."""
    sampled.device(site.id(2), utilization=0.0)
    for place, idle in enumerate(seconds, 1):
        share(site, str(11 + place), "alice", place)
        sampled.claim(f"t{11 + place}", f"{site.id(2)}.share{place}", busy=0.0, idle=idle)
    sampled.write()


def test_a_shared_gpu_is_idle_when_all_its_holders_are(site: Site, sampled: Sampled) -> None:
    idle_shares(site, sampled, HOUR, HOUR)
    assert [line.partition(" 0s")[0] for line in card_lines(site)] == [
        "held (idle) 12 alice gpu.q 1/4",
        "13 alice gpu.q 1/4",
    ]
    assert site.json()["totals"]["held_idle"] == 1


def test_one_idle_holder_makes_no_idle_gpu_and_is_listed(site: Site, sampled: Sampled) -> None:
    idle_shares(site, sampled, 0.0, HOUR)
    assert site.states()[2] == "held"
    assert [line.partition(" 0s")[0] for line in card_lines(site, "--idle", "30m")] == [
        "held 12 alice gpu.q 1/4",
        "held (idle) 13 alice gpu.q 1/4",
    ]
    assert site.call("status", "--idle", "2h").exit_code == 1


def test_json_has_the_work_of_each_holder(site: Site, sampled: Sampled) -> None:
    share(site, "12", "alice", 1)
    share(site, "13", "bob", 2)
    sampled.device(site.id(2))
    sampled.claim("t13", f"{site.id(2)}.share2", busy=10.0, idle=5.0, memory_peak=GIB)
    sampled.write()
    holders = site.json()["gpus"][2]["holders"]
    assert [(one["job_id"], one["places"], one["devices"]) for one in holders] == [
        ("12", 4, [f"{site.id(2)}.share1"]),
        ("13", 4, [f"{site.id(2)}.share2"]),
    ]
    nothing = dict.fromkeys(
        ("idle_seconds", "busy_seconds", "observed_seconds", "memory_peak_bytes")
    )
    assert [one["use"] for one in holders] == [
        nothing,
        {
            **{"idle_seconds": 5.0, "busy_seconds": 10.0},
            **{"observed_seconds": 100.0, "memory_peak_bytes": GIB},
        },
    ]
