# SPDX-License-Identifier: Apache-2.0
"""The history: every finished claim is one line, with what is believed of the exporter's word."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pytest

from gpulock.daemon.history.files import (
    append_history_lines,
    expired_months,
    find_written_tokens,
    name_month,
)
from gpulock.daemon.history.record import (
    ClaimedDevice,
    ExporterSamples,
    build_history_record,
    parse_release_reason,
)
from gpulock.store import atomic, grants
from tests.support.faults import raising
from tests.support.history_site import GIB, Ended
from tests.support.trees import bus

DAY = 86400.0


def test_a_claim_of_several_devices_is_one_line(site: Ended) -> None:
    own = site.hold(0, 1, queue="gpu.q")
    site.sample()
    site.finish(own, site.account(own, 0), site.account(own, 1, busy=0.0, last_busy=1.0))
    site.end(0, 1)
    assert site.write() == 1
    (found,) = site.lines()
    assert [found[key] for key in ("job_id", "user", "gpus", "how")] == ["12", "alice", 2, "epilog"]
    assert found["held_seconds"] == pytest.approx(100, abs=1)
    assert found["gpu_seconds"] == pytest.approx(200, abs=2)
    assert (found["busy_seconds"], found["observed_seconds"]) == (40.0, 160.0)
    assert (found["energy_joules"], found["memory_peak_bytes"]) == (10000.0, 3 * GIB)
    assert found["last_busy"] == pytest.approx(own.claimed_at + 95, abs=0.01)
    first, second = found["devices"]
    assert (first["id"], first["uuid"], first["minor"], first["index"]) == (bus(0), "GPU-0", 0, 0)
    assert (first["busy_seconds"], second["busy_seconds"], second["last_busy"]) == (40.0, 0.0, None)
    assert first["memory_bytes"] == 80 * GIB
    assert found["shapes"][bus(0)] == {"width": 2.0, "use": [500] * 40}
    assert site.waiting() == []
    modes = [path.stat().st_mode & 0o777 for path in (site.path, site.path.parent)]
    assert modes == [0o644, 0o755], "everybody's to read, its author's to write"


def test_a_claim_waits_for_its_last_device(site: Ended) -> None:
    site.hold(0, 1)
    site.end(0)
    assert (site.write(), site.waiting()) == (0, [])
    site.end(1, how="reap: its shepherd is gone")
    assert site.write() == 1
    (found,) = site.lines()
    assert found["gpus"] == 2
    assert [one["how"] for one in found["devices"]] == ["epilog", "reap"]
    assert [(one["uuid"], one["minor"]) for one in found["devices"]] == [("GPU-0", 0), ("GPU-1", 1)]
    assert (found["how"], found["proof"]) == ("reap", "its shepherd is gone")


@pytest.mark.parametrize("ends", ["its last word", "it died", "it never says it"])
def test_the_history_waits_for_the_exporters_last_word_while_it_lives(
    site: Ended, ends: str
) -> None:
    own = site.hold(0)
    site.sample(site.account(own, 0, busy=7.0))
    site.end(0)
    assert site.write() == 0
    if ends == "its last word":
        site.finish(own, site.account(own, 0))
    elif ends == "it died":
        site.sample(site.account(own, 0, busy=7.0), ago=30)
    else:
        (site.finished() / "released").write_text(f"{bus(0)} 1000.0 1.0 0 GPU-0 epilog\n")
    assert site.write() == 1
    assert ends == "it never says it" or (
        site.lines()[0]["busy_seconds"] == (40.0 if ends == "its last word" else 7.0)
    )


@pytest.mark.parametrize(
    ("fields", "key", "value"),
    [
        ({"observed": 1e9, "busy": 1e9}, "busy_seconds", 100),
        ({"busy": 1e300}, "busy_seconds", 80),
        ({"energy": 1e15}, "energy_joules", None),
        ({"memory_peak": 81 * GIB}, "memory_peak_bytes", None),
        ({"memory_peak": "9" * 4000}, "memory_peak_bytes", None),
        ({"foreign": 1e12}, "foreign_seconds", 100),
        ({"last_busy": 1e12}, "last_busy", None),
        ({"busy": "nan"}, "busy_seconds", None),
        ({"observed": "-5"}, "observed_seconds", 0.0),
    ],
)
def test_what_cannot_be_true_is_not_believed(
    site: Ended, fields: dict[str, object], key: str, value: float | None
) -> None:
    own = site.claim(0)
    site.sample()
    site.finish(own, site.account(own, 0, **fields))
    site.write()
    found = site.lines()[0]
    assert found[key] == (value if value is None else pytest.approx(value, rel=0.02))
    assert (found["observed_seconds"] or 0) <= found["held_seconds"]


def test_a_finished_claim_that_cannot_be_read_is_told_once_and_holds_up_nobody(site: Ended) -> None:
    site.claim(0)
    site.claim(1, token="beef")
    (site.finished() / "record").write_text("garbage")
    site.finished("x").mkdir()
    (site.finished("beef") / "released").unlink()
    assert site.write() == 1
    site.write()
    assert (site.tokens(), site.waiting()) == (["beef"], ["feed"])
    assert len(site.told) == 1 and "cannot be read" in site.told[0]


@pytest.mark.parametrize("fault", [ValueError, OverflowError])
def test_a_claim_of_which_no_line_can_be_made_holds_up_nobody(
    site: Ended, monkeypatch: pytest.MonkeyPatch, fault: type[Exception]
) -> None:
    def fail(parts: list[ClaimedDevice], *rest: Any) -> dict[str, Any]:
        if parts[0].owner.token == "feed":
            raise fault("no number")
        return build_history_record(parts, *rest)

    monkeypatch.setattr("gpulock.daemon.history.writer.build_history_record", fail)
    site.claim(0)
    site.claim(1, token="beef")
    site.write()
    assert (site.tokens(), site.waiting()) == (["beef"], ["feed"])
    assert site.told == ["claim feed has no line: no number; remove it from finished"]


def test_a_claim_of_which_it_cannot_be_read_what_was_released_waits(
    site: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record names only the device that was released last."""
    site.claim(0, 1)
    real = atomic.read_text

    def read(path: str, *rest: int) -> str:
        if path.endswith("/released"):
            raise OSError(errno.EIO, "input/output error")
        return real(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "read_text", read)
        assert (site.write(), site.waiting()) == (0, ["feed"])
    assert (site.write(), site.lines()[0]["gpus"]) == (1, 2)


@pytest.mark.parametrize("text", ["gpulock-owner 1\nscheduler=sge\n", "\0" * 300])
def test_a_finished_record_that_a_power_cut_left_goes_and_its_copy_tells(
    site: Ended, text: str
) -> None:
    site.run_job(0)
    site.claim(1, token="beef")
    site.end(0)
    for token in ("feed", "beef"):
        (site.finished(token) / "record").write_text(text)
    site.write()
    assert (site.tokens(), site.waiting(), site.told) == (["feed"], [], [])


def test_a_record_under_another_claims_name_is_not_taken(site: Ended) -> None:
    site.claim(0)
    site.finished().rename(site.finished("beef"))
    assert site.write() == 0
    assert "record of claim" in site.told[0]


@pytest.mark.parametrize("text", ["", bus(0), f"{bus(0)} nan - - - x\n", f"{bus(0)} 5 - - -"])
def test_a_release_whose_note_was_cut_short_is_written_with_what_is_known(
    site: Ended, text: str
) -> None:
    site.claim(0)
    (site.finished() / "released").write_text(text)
    assert site.write() == 1
    found = site.lines()[0]
    assert found["how"] == "unknown"
    assert found["held_seconds"] == pytest.approx(100, abs=2)
    site.hold(1, token="beef")
    (site.records / "claims/beef/released").write_text(f"{bus(1)} 1000.0 1.0 0 GPU-0 ep")
    site.end(1, how="reap: its shepherd is gone")
    assert (site.write(), site.lines()[1]["how"]) == (1, "reap"), "what follows it counts"


def test_a_history_that_cannot_be_written_keeps_the_claims_and_is_told_once(site: Ended) -> None:
    site.claim(0)
    (site.state / "history").write_text("in the way")
    assert [site.write() for _ in range(3)] == [0, 0, 0]
    assert len(site.told) == 1 and "waits in" in site.told[0]
    (site.state / "history").unlink()
    assert site.write() == 1
    site.path.rename(site.state / "kept")
    site.claim(1, token="beef")
    site.path.mkdir()
    assert site.write() == 0
    site.path.rmdir()
    assert (site.write(), site.waiting()) == (1, [])


def test_the_file_of_a_moment_is_that_of_its_month_in_utc() -> None:
    assert name_month(1793491199.9) == "2026-10.jsonl"
    assert name_month(1793491200.0) == "2026-11.jsonl"
    assert [name_month(at) for at in (-1e300, float("nan"))] == ["1970-01.jsonl"] * 2
    assert name_month(float("inf")) == "9999-12.jsonl"


NOVEMBER = 1793491200.0 + 14 * DAY  # 2026


def test_a_clock_that_is_ahead_for_a_moment_ends_no_history() -> None:
    names = [f"2026-{month:02}.jsonl" for month in range(1, 12)]
    for ahead in (NOVEMBER, 4e9):
        names = sorted({*names, name_month(ahead)})
        assert expired_months(names, 365, ahead) == []
    old = ["2020-01.jsonl", "2025-09.jsonl", "2025-10.jsonl", "2026-10.jsonl"]
    assert [expired_months(old, days, NOVEMBER) for days in (365, 0)] == [old[:2], []]


def test_an_author_removes_what_is_older_than_history_days(site: Ended) -> None:
    site.settings["HISTORY_DAYS"] = "30"
    folder = site.path.parent
    folder.mkdir()
    for name in ("1999-01.jsonl", "1999-12.jsonl", "1999-99.jsonl", "1999-01.jsonl.kept"):
        (folder / name).touch()
    site.claim(0)
    site.write()
    kept = {"1999-12.jsonl", "1999-99.jsonl", "1999-01.jsonl.kept", site.path.name, "gate"}
    assert {path.name for path in folder.iterdir()} == kept


def test_a_line_is_looked_for_in_the_last_two_files_and_in_all_since_its_claim(site: Ended) -> None:
    site.claim(0)
    site.write()
    line, folder = site.path.read_bytes(), site.path.parent
    site.path.unlink()
    for month in ("2026-06", "2026-07", "2026-08"):
        (folder / f"{month}.jsonl").touch()

    def found_in(month: str, began: float) -> bool:
        place = folder / f"{month}.jsonl"
        place.write_bytes(line)
        try:
            return find_written_tokens(str(folder), {"feed", "beef"}, began) == {"feed"}
        finally:
            place.write_bytes(b"")

    assert found_in("2026-08", NOVEMBER) and found_in("2026-07", NOVEMBER)
    assert not found_in("2026-06", NOVEMBER)
    assert found_in("2026-06", NOVEMBER - 150 * DAY)


@pytest.mark.parametrize(
    ("how", "word", "proof"),
    [
        ("epilog", "epilog", ""),
        ("reap: another boot", "reap", "another boot"),
        ("claim: this run's claim was cut short", "claim", "this run's claim was cut short"),
        ("claim undone", "undone", ""),
        ("release --force by root: it hangs", "admin", "root: it hangs"),
        ("unreserved by root", "admin", "root"),
        ("released by alice", "release", "alice"),
        ("", "unknown", ""),
        ("what\nelse", "other", "what?else"),
    ],
)
def test_how_a_lock_was_released_is_one_word_and_a_proof(how: str, word: str, proof: str) -> None:
    assert parse_release_reason(how) == (word, proof)


def test_claims_that_were_dropped_before_they_had_a_line_are_told_and_counted(
    site: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grants, "FINISHED_CAP", 6)
    monkeypatch.setattr(grants, "FINISHED_PRUNE", 4)
    for number in range(6):
        site.claim(0, token=f"t{number}")
    assert (site.write(), site.waiting()) == (2, [])
    told = ["the history lacks 4 claims of this boot: more than 6 finished ones waited for it"]
    assert site.told == told
    site.write()
    assert site.told == told


def test_where_a_new_file_is_not_made_durable_nothing_was_added(
    site: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.claim(0)
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "fsync_path", raising(OSError(errno.EIO, "worn out")))
        assert (site.write(), site.lines()) == (0, [])
    assert site.write() == 1


def test_a_folder_that_is_a_link_to_a_larger_disk_is_as_good(site: Ended) -> None:
    (site.root / "large").mkdir()
    (site.state / "history").symlink_to(site.root / "large")
    for token in "ab":
        site.claim(0, token=token)
        assert site.write() == 1
    assert (site.tokens(), site.waiting(), site.told) == (["a", "b"], [], [])


def test_a_release_that_seems_to_be_of_the_next_millisecond_is_waited_for_as_well(
    site: Ended,
) -> None:
    own = site.hold(0)
    site.sample(site.account(own, 0))
    now = time.time()
    assert ExporterSamples(str(site.exporter)).may_come(own.token, own.boot_id, now + 0.0005, now)
    assert not ExporterSamples(str(site.exporter)).may_come(own.token, own.boot_id, now + 3600, now)


@pytest.mark.parametrize("tail", [b'{"to', b"\0" * 700, b"[" * 100_000])
def test_a_line_that_was_cut_short_goes_before_the_next_one_is_written(
    tmp_path: Path, tail: bytes
) -> None:
    path = tmp_path / "2026-11.jsonl"
    path.write_bytes(b'{"whole":1}\n' + tail)
    append_history_lines(str(path), b'{"next":1}\n')
    assert path.read_bytes() == b'{"whole":1}\n{"next":1}\n'
