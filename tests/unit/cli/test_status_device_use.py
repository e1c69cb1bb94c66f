# SPDX-License-Identifier: Apache-2.0
"""`gpulock status` with the samples: what devices and holders do, or why that is not known."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulock.store.verdicts import Verdict
from tests.support.cli_site import ROOT, Site
from tests.support.runner import read_facts
from tests.support.samples import GIB, Sampled

HOUR = 3600


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, up_for_a_day: None) -> None:
    monkeypatch.setenv("COLUMNS", "140")


def row(text: str, index: int) -> dict[str, str]:
    """Return a line of the table by the titles above it."""
    head, line = text.splitlines()[0], text.splitlines()[index + 1]
    titles = ["GPU", "STATE", "HELD FOR", "UTIL", "MEAN", "MEM GIB"]
    titles += ["TEMP", "POWER", "LAST BUSY", "FOREIGN"]
    found: dict[str, str] = {}
    for title in titles:
        at = head.find(title)
        if at < 0:
            continue
        here = line[at : at + len(title)]
        left = title == "STATE"
        part = line[at:] if left else line[: at + len(title)]
        found[title] = part.split("  ")[0 if left else -1].strip() if here.strip() else ""
    return found


def test_what_a_device_does_stands_beside_who_holds_it(site: Site, sampled: Sampled) -> None:
    site.hold(1)
    site.hold(2, token="u")
    beside = {"temperature": 61.4, "power": 287.2}
    sampled.device(site.id(1), utilization=0.87, memory_used=12 * GIB + GIB // 3, **beside)
    sampled.device(site.id(2), utilization=0.0, memory_used=None)
    sampled.device(site.id(3), utilization=0.0, memory_used=GIB // 2)
    sampled.claim("t", site.id(1), last_busy=sampled.now)
    sampled.claim("u", site.id(2), last_busy=None, idle=90.0)
    sampled.write()
    text = re.sub(r" [1-9]s\b", " 0s", site.call("status").stdout)  # on a busy machine
    assert row(text, 1) == {
        **{"GPU": "1", "STATE": "held", "HELD FOR": "0s", "UTIL": "87%", "MEAN": "50%"},
        **{"MEM GIB": "12/32", "TEMP": "61C", "POWER": "287W", "LAST BUSY": "now"},
    }
    assert (row(text, 2)["LAST BUSY"], row(text, 2)["MEM GIB"]) == ("never", "-")
    assert (row(text, 3)["UTIL"], row(text, 3)["MEM GIB"]) == ("0%", "0.5/32")
    assert row(text, 4)["UTIL"] == row(text, 4)["MEM GIB"] == row(text, 4)["LAST BUSY"] == "-"
    assert row(text, 4)["TEMP"] == row(text, 4)["POWER"] == "-"
    assert text.splitlines()[-1] == "8 GPUs: 6 free, 2 held"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"age": 90}, "for 1m (journalctl -u gpulock-exporter)"),
        ({"boot_id": "another"}, "in this boot"),
        ({"age": -30}, "dated in the future"),
        ({"looked": 45}, "has had no answer from the driver for 45s"),
        ({"looked": None}, "has had no answer from the driver yet"),
        ({"looked": 60, "fault": "version mismatch"}, "for 1m (version mismatch)"),
        ({"looked": 60, "fault": f"a\x1b[31mb{'c' * 999}"}, "for 1m (a?[31mbccc"),
    ],
)
def test_a_sample_that_is_not_to_be_believed_is_not_shown_and_one_line_says_why(
    site: Site, sampled: Sampled, how: dict[str, float], said: str
) -> None:
    site.hold(0)
    sampled.device(site.id(0))
    sampled.device(site.id(5), foreign=1)
    sampled.claim("t", site.id(0), idle=HOUR)
    sampled.write(**how)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    text = site.call("status").stdout
    assert "UTIL" not in text and "8 GPUs: 7 free, 1 held" in text
    assert said in read_facts(text)["samples"]
    found = site.json()
    assert said in found["sample"].pop("reason")
    assert not found["sample"]["fresh"]
    assert {gpu["use"] for gpu in found["gpus"]} == {None}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Path.exists, "no gpulock-exporter runs"),
        (Path.touch, "cannot be read"),
        (os.mkfifo, "cannot be read"),  # which keeps nobody waiting
    ],
)
def test_a_folder_without_a_sample_is_said(
    site: Site, make: Callable[[Path], object], said: str
) -> None:
    site.files.exporter_dir.mkdir()
    make(site.files.exporter_dir / "sample")
    assert said in read_facts(site.call("status").stdout)["samples"]


def test_foreign_processes_are_counted_and_named(site: Site, sampled: Sampled) -> None:
    site.hold(0)
    site.publish(t=Verdict("alive", "its shepherd runs"))
    sampled.device(site.id(0), foreign=2, foreign_pids="41,42", processes=3)
    sampled.device(site.id(1), foreign=1, foreign_pids="43")
    sampled.device(site.id(2), foreign=9, foreign_pids="1,2,3,4,5,6,7,8")
    sampled.device(site.id(3), foreign=0, unseen=1)
    sampled.write()
    text = site.call("status").stdout
    assert [row(text, number)["FOREIGN"] for number in range(4)] == ["2", "1", "9", ""]
    assert [row(text, number)["STATE"] for number in range(4)] == ["held", *["foreign"] * 2, "free"]
    notes = read_facts(text)
    assert "foreign: in use by processes 41, 42, not of job 12 of alice" in notes["GPU 0"]
    assert "foreign: free, but in use by process 43" in notes["GPU 1"]
    assert "in use by 9 processes, such as 1;" in notes["GPU 2"]
    use = [gpu["use"] for gpu in site.json()["gpus"][:4]]
    assert [one["foreign_processes"] for one in use] == [2, 1, 9, None]
    assert use[0]["foreign_pids"] == [41, 42]


def test_numbers_that_cannot_be_neither_break_the_table_nor_the_command(
    site: Site, sampled: Sampled
) -> None:
    site.hold(0)
    huge = "9" * 4000
    sampled.device(
        site.id(0), utilization=1e300, memory_used=huge, foreign=huge, last_busy=1e300, power=1e308
    )
    sampled.device(site.id(1), memory_used="9" * 18, memory_total=1, foreign="9" * 18, unseen=huge)
    sampled.claim("t", site.id(0), idle=1e308, busy=1e308, observed=1e-308, last_busy=1e300)
    sampled.write()
    text = site.call("status").stdout
    assert max(len(line) for line in text.splitlines()) <= 140
    assert row(text, 0)["POWER"] == "9999W"
    assert (row(text, 0)["UTIL"], row(text, 0)["MEM GIB"], row(text, 0)["LAST BUSY"]) == (
        *("100%", "-", "now"),
    )
    assert site.json()["gpus"][0]["use"]["memory_used_bytes"] is None
    assert site.call("status", "--idle", "1h").exit_code == 0


def test_idle_lists_those_that_are_held_and_do_nothing(site: Site, sampled: Sampled) -> None:
    for number, idle in enumerate((2000.0, 599.0, 1800.0, 600.0)):
        site.hold(number, token=f"t{number}")
        sampled.device(site.id(number))
        sampled.claim(f"t{number}", site.id(number), idle=idle, last_busy=sampled.now - HOUR)
    sampled.device(site.id(5), utilization=0.0)
    site.hold(6, token="r", scheduler="admin", job_id=site.id(6), comment="burn-in")  # is to rest
    sampled.claim("r", site.id(6), idle=float(HOUR))
    site.hold(7, token="u")  # that nobody observes any more
    sampled.claim("u", site.id(7), idle=float(HOUR), seen=sampled.now - 60)
    for number in (6, 7):
        sampled.device(site.id(number), utilization=0.0, age=60 if number == 7 else 0)
    sampled.write()
    assert site.states()[:4] == ["held_idle", "held", "held_idle", "held_idle"]
    assert site.states()[6:] == ["held", "held"]
    assert site.json()["totals"]["held_idle"] == 3
    text = site.call("status").stdout
    assert (row(text, 3)["STATE"], row(text, 3)["LAST BUSY"]) == ("held (idle)", "1h00m ago")
    assert row(text, 7)["UTIL"] == "-"
    result = site.call("status", "--idle", "30m")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["GPU", "0", "2", "8"]
    assert [gpu["index"] for gpu in site.json("--idle", "30m")["gpus"]] == [0, 2]
    none = site.call("status", "--idle", "1h")
    assert (none.exit_code, none.stdout.splitlines()) == (
        1,
        ["8 GPUs: 2 free, 3 held, 3 held (idle)"],
    )


def test_what_is_idle_is_not_guessed_without_samples(site: Site, sampled: Sampled) -> None:
    site.hold(0)
    without = site.call("status", "--idle", "30m")
    assert (without.exit_code, without.stdout) == (1, "")
    assert "what is idle is not known: no gpulock-exporter runs" in without.stderr
    sampled.write(age=60)
    old = site.call("status", "--idle", "30m")
    assert (old.exit_code, "has written nothing" in old.stderr) == (1, True)


def test_json_tells_what_a_device_did(site: Site, sampled: Sampled) -> None:
    site.hold(0)
    sampled.device(site.id(0), power=210.5, temperature=61.0, last_busy=sampled.now - 5)
    sampled.claim("t", site.id(0), idle=7.0, memory_peak=20 * GIB)
    sampled.write(age=1.5)
    found = site.json()
    assert found["sample"]["fresh"] and found["sample"]["reason"] == ""
    assert 1.5 <= found["sample"]["age_seconds"] < 10
    use = found["gpus"][0]["use"]
    assert abs(use.pop("last_busy") - (found["gpus"][0]["held"]["claimed_at"] - 5)) < 5
    assert use == {
        **{"utilization": 0.5, "memory_used_bytes": 12 * GIB, "memory_total_bytes": 32 * GIB},
        **{"power_watts": 210.5, "temperature_celsius": 61.0, "processes": 1},
        **{"foreign_processes": 0, "foreign_pids": [], "idle_seconds": 7.0},
        **{"busy_seconds": 50.0, "observed_seconds": 100.0, "memory_peak_bytes": 20 * GIB},
    }
    text = (ROOT / "docs/status-json.md").read_text()
    assert [key for key in (*use, *found["sample"], "last_busy") if f"`{key}`" not in text] == []


@pytest.mark.parametrize("width", [80, 120, 160])
def test_the_table_fits_and_what_counts_most_is_in_it(
    site: Site, sampled: Sampled, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    site.hold(0, job_id="1048576", task_id="17", user="a-long-user-name")
    sampled.device(site.id(0), foreign=1, foreign_pids="4711")
    sampled.claim("t", site.id(0), idle=900.0)
    sampled.write()
    head, *lines = site.call("status").stdout.splitlines()
    # a path stays whole, to be copied
    assert max(len(line) for line in (head, *lines) if site.config not in line) <= width
    assert "1048576.17" in lines[0]
    assert all(title in head for title in ("GPU", "STATE", "USER", "UTIL", "MEM GIB", "LAST BUSY"))
    assert ("BUS ID" in head, "FOREIGN" in head) == (width >= 120, width >= 160)


# --- a GPU with several holders: each with its part and its work ----------------------------------


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
    shown = site.call("status").stdout
    assert "SHARE" not in shown and "UTIL" not in shown, "no exporter has a folder"
    assert shown.splitlines()[-1] == "8 GPUs: 8 free"
    assert (site.json()["sample"], site.json()["gpus"][0]["use"]) == (None, None)
    site.hold_places(2, "12", 1, 2)
    site.hold_places(2, "13", 3, user="bob", places=0)  # that nobody counts
    assert card_lines(site) == ["held 12 alice gpu.q 2/4 0s", "13 bob gpu.q 1/? 0s"]
    title, whole = site.call("status").stdout.splitlines()[:2]
    assert title.split()[-4:] == ["QUEUE", "SHARE", "HELD", "FOR"]
    assert whole.split()[-1] == "free"


def test_each_holder_has_its_own_work_and_the_card_has_its_own(
    site: Site, sampled: Sampled
) -> None:
    site.hold_places(2, "12", 1, 2)
    site.hold_places(2, "13", 3, user="bob")
    sampled.device(site.id(2), utilization=0.75, memory_used=12 * GIB)
    for place in (1, 2):  # a claim of several places has the same on each
        sampled.claim("t12", f"{site.id(2)}.share{place}", busy=50.0, last_busy=sampled.now)
    did = {"busy": 10.0, "last_busy": sampled.now - HOUR, "memory_peak": GIB}
    sampled.claim("t13", f"{site.id(2)}.share3", **did)
    sampled.write()
    assert card_lines(site) == [
        "held 12 alice gpu.q 2/4 0s 75% 50% 12/32 now",
        "13 bob gpu.q 1/4 0s 10% 1h00m ago",
    ]
    first, _, second = site.json()["gpus"][2]["holders"]  # one for each place
    places = [f"{site.id(2)}.share{number}" for number in (1, 2, 3)]
    assert (first["job_id"], first["places"], first["devices"]) == ("12", 4, places[:2])
    assert (second["job_id"], second["places"], second["devices"]) == ("13", 4, places[2:])
    assert second["use"] == {
        **{"idle_seconds": 0.0, "busy_seconds": 10.0},
        **{"observed_seconds": 100.0, "memory_peak_bytes": GIB},
    }


def test_a_holder_in_another_state_than_the_gpu_says_so(site: Site) -> None:
    site.hold_places(2, "12", 1, scheduler="slurm")
    site.hold_places(2, "13", 2, user="bob", scheduler="slurm")
    site.publish(t12=Verdict("alive", "it runs"), t13=Verdict("unknown", "nobody sees it"))
    assert card_lines(site) == ["unknown 13 bob gpu.q 1/4 0s", "held 12 alice gpu.q 1/4 0s"]


def idle_shares(site: Site, sampled: Sampled, *seconds: float) -> None:
    """Let jobs share the third GPU, each idle for so long."""
    sampled.device(site.id(2), utilization=0.0)
    for place, idle in enumerate(seconds, 1):
        site.hold_places(2, str(11 + place), place)
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
