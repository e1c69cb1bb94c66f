# SPDX-License-Identifier: Apache-2.0
"""What stood when the node went down is in the history as well: once, with what is known."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.reaper import HELD, ReapOutcome
from gpulock.daemon.history import pending
from gpulock.daemon.reconcile.reconcile import ReconcileReport, reconcile_locks
from gpulock.deadline import clock_boottime
from gpulock.errors import Refusal
from gpulock.report import text
from gpulock.report.claims import GpuTimes, parse_reported_claim
from gpulock.report.scan import add_times
from gpulock.report.sources import find_local_claims
from gpulock.schedulers.liveness import make_liveness_judge
from gpulock.store import boot, grants, owner
from gpulock.store.event_log import count_dropped_claims
from gpulock.store.verdicts import ALIVE, UNKNOWN, Verdict
from gpulock.workstation.process_claims import claim_for_process, make_process_owner
from tests.support.history_site import Ended
from tests.support.trees import BOOT, OTHER_BOOT, Box, bus, record, soon

DAY = 86400.0


# --- a record is made with each claim -------------------------------------------------------------


def test_a_record_is_made_with_the_claim_of_a_process(tmp_path: Path) -> None:
    box = Box(tmp_path, 1)
    node = box.node()
    box.proc.add(900, "python")
    own = make_process_owner(node, 900, "alice")
    grant = claim_for_process(node, own, ClaimRequest(1), soon())
    (kept,) = (box.state / "owed").iterdir()
    assert owner.parse_owner(kept.read_text()).devices == grant.owner.devices == (bus(0),)


def test_a_link_in_the_place_of_the_record_is_not_followed(site: Ended) -> None:
    elsewhere = site.root / "elsewhere"
    elsewhere.write_text(owner.encode_owner(record(token="feed")))
    (site.state / "owed").mkdir()
    (site.state / "owed/feed").symlink_to(elsewhere)
    site.write()
    assert (site.tokens(), len(site.told)) == ([], 1)


def test_where_nobody_writes_a_history_no_copies_pile_up(site: Ended) -> None:
    for number in range(grants.FINISHED_PRUNE):
        site.finished(str(number)).mkdir()
    site.run_job(0)
    assert site.owed() == []


def test_a_boot_drops_and_counts_the_oldest_copies_beyond_the_cap(
    site: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, token in enumerate(("b", "a", "c")):
        site.run_job(number, token=token)
        os.utime(site.state / "owed" / token, (number, number))
    monkeypatch.setattr(grants, "OWED_CAP", 2)
    site.reboot()
    assert site.owed() == ["a", "c"]
    assert count_dropped_claims(site.node().store.path) == 1


# --- there is a record of the claim ---------------------------------------------------------------


@pytest.mark.parametrize("off", [0.0, 7 * DAY])
def test_a_lock_directory_kept_over_a_reboot_bills_no_time_in_which_the_node_was_off(
    site: Ended, off: float
) -> None:
    """Neither by this boot's clock, which says nothing of the other's, nor by the calendar's."""
    own = site.run_job(0, 1, ago=DAY + off)
    seen = own.claimed_at + DAY
    os.utime(site.state / "owed/feed", (seen, seen))
    site.reboot(wiped=False)
    node = site.node()
    released = reconcile_locks(node, make_liveness_judge(node), soon())
    (claim,) = find_local_claims(node, lambda _: True)
    site.history.run(node, released, 1e6)
    (found,) = site.lines()
    for told in (claim.record, found):
        assert told["held_seconds"] == pytest.approx(DAY, abs=0.01)
        assert told["gpu_seconds"] == pytest.approx(2 * DAY, abs=0.01)
        assert told["released_at"] == pytest.approx(seen, abs=0.01)
    assert f"{found['how']}: {found['proof']}" == pending.REBOOT_PROOF
    assert (found["devices"][0]["minor"], site.owed()) == (0, [])


def test_a_claim_that_ended_before_the_reboot_keeps_its_time(site: Ended) -> None:
    site.run_job(0, ago=DAY)
    site.end(0)
    site.reboot(wiped=False)
    assert (site.write(), site.tokens()) == (1, ["feed"])
    assert site.lines()[0]["held_seconds"] == pytest.approx(DAY, abs=1)


def see_held(site: Ended, verdict: Verdict) -> None:
    """Let a reconcile see that the first card is held."""
    node = site.node()
    held = ReapOutcome(node.store.read(bus(0)), HELD, verdict, "")
    site.history.run(node, ReconcileReport([], [held]), 1000.0)


# --- the copy is all that is left -----------------------------------------------------------------


def test_a_claim_that_stood_when_the_node_went_down_is_one_line(site: Ended) -> None:
    own = site.run_job(0, 1, ago=5000.0, queue="gpu.q")
    seen = own.claimed_at + 4000
    os.utime(site.state / "owed/feed", (seen, seen))
    site.reboot()
    assert (site.write(), site.write()) == (1, 0)
    (found,) = site.lines()
    assert [found[key] for key in ("token", "user", "queue", "gpus")] == [
        "feed",
        "alice",
        "gpu.q",
        2,
    ]
    assert f"{found['how']}: {found['proof']}" == pending.REBOOT_PROOF
    assert found["released_at"] == pytest.approx(seen, abs=0.01)
    assert found["held_seconds"] == pytest.approx(4000, abs=0.01)
    assert found["gpu_seconds"] == pytest.approx(8000, abs=0.01)
    assert (found["busy_seconds"], found["observed_seconds"], found["shapes"]) == (None, 0, {})
    assert found["energy_joules"] is None
    assert [one["id"] for one in found["devices"]] == [bus(0), bus(1)]
    assert (site.owed(), site.told) == ([], [])


def test_gpulockd_notes_which_claims_stand(site: Ended) -> None:
    path = site.state / "owed/feed"
    own = site.run_job(0)
    site.run_job(1, token="gone")
    for name in ("feed", "gone"):
        os.utime(site.state / "owed" / name, (1, 1))
    see_held(site, Verdict(ALIVE, ""))
    assert path.stat().st_mtime > own.claimed_at
    assert (site.state / "owed/gone").stat().st_mtime == 1


def test_a_note_for_a_claim_without_a_record_makes_none(site: Ended) -> None:
    claims = [record(token=token) for token in ("feed", "../boot_id")]
    pending.touch_last_seen(str(site.state), claims, clock_boottime())
    assert site.owed() == []
    assert (site.state / "boot_id").read_text().strip() == BOOT


def lose_power(site: Ended) -> dict[str, Any]:
    """Let the node come up without its /run; return the line of the claim that stood."""
    site.reboot()
    assert site.write() == 1
    return site.lines()[-1]


def test_of_a_claim_that_nobody_saw_again_no_time_is_known(site: Ended) -> None:
    own = site.run_job(0, 1, ago=0.5)
    found = lose_power(site)
    assert (found["held_seconds"], found["gpu_seconds"]) == (None, None)
    assert found["released_at"] == pytest.approx(own.claimed_at, abs=60)
    claim = parse_reported_claim(found)
    assert "for how long is not known" in "\n".join(text.format_job_report([claim]))
    total = GpuTimes()
    add_times(total, b"null", b"null", b"0.0")
    add_times(total, b"0.0", b"1.0", b"null")  # nobody writes it; it costs itself alone
    assert (total.claims, total.held) == (2, 0.0)


@pytest.mark.parametrize("claimed_at", [1000.0, 9e9])
def test_a_clock_that_is_set_after_a_claim_changes_no_time_held(
    site: Ended, claimed_at: float
) -> None:
    site.run_job(0, 1, ago=500.0, claimed_at=claimed_at)
    see_held(site, Verdict(ALIVE, ""))
    found = lose_power(site)
    assert found["held_seconds"] == pytest.approx(500, abs=5)
    assert found["claimed_at"] == claimed_at
    assert found["released_at"] == pytest.approx(min(claimed_at + 500, time.time()), abs=5)
    assert found["gpus"] == 2


def test_a_record_that_a_power_cut_brought_back_gives_no_second_line(site: Ended) -> None:
    site.run_job(0, token="first")
    data = (site.state / "owed/first").read_bytes()
    site.end(0)
    site.write()
    site.claim(1, token="other")
    site.write()
    for _ in range(2):  # found by a gpulockd that wrote it itself, then by one that knows nothing
        (site.state / "owed/first").write_bytes(data)
        assert (site.write(), site.owed()) == (0, [])
        site.reboot()
    assert site.tokens() == ["first", "other"]


def test_after_run_was_wiped_a_claim_that_ended_meanwhile_is_told_without_how(site: Ended) -> None:
    site.run_job(0)
    site.lose_run()
    node = site.node()
    with pytest.raises(Refusal):
        reconcile_locks(node, make_liveness_judge(node), soon())
    assert (site.write(), site.owed()) == (0, ["feed"])
    boot.begin_boot(node.store, str(site.state), node.boot_id, node.name)
    assert site.write() == 1
    assert [(found["how"], found["proof"]) for found in site.lines()] == [("unknown", "")]


@pytest.mark.parametrize("kind", ["garbage", "other", "link", "fifo", "folder", "huge"])
def test_a_record_that_makes_no_sense_is_told_once_and_holds_up_nobody(
    site: Ended, kind: str
) -> None:
    site.run_job(0)
    place = site.state / "owed/beef"
    text = owner.encode_owner(record(token="beef", devices=(bus(1),)))
    if kind == "link":
        target = site.root / "beef"
        target.write_text(text)
        place.symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        texts = {
            "garbage": "\x01" * 700,
            "other": text.replace("token=beef", "token=dead"),
            "huge": text + "comment=" + "x" * (1 << 17) + "\n",
        }
        place.write_text(texts[kind])
    site.reboot()
    assert (site.write(), site.write()) == (1, 0)
    assert site.tokens() == ["feed"]
    (told,) = site.told
    assert told.startswith(f"{place} cannot be read: ")


WHOLE = owner.encode_owner(record(token="beef", devices=(bus(1), bus(2))))
TORN = {
    "empty": "",
    "zeros": "\0" * 700,
    "in the first line": WHOLE[:9],
    "in the token": WHOLE[: WHOLE.index("beef") + 2],
    "before the devices": WHOLE[: WHOLE.index("devices=")],
    "in the devices": WHOLE[:-9],
    "with zeros at the end": WHOLE[:200] + "\0" * (len(WHOLE) - 200),
    "with zeros at the beginning": "\0" * 200 + WHOLE[200:],
}


@pytest.mark.parametrize("torn", TORN)
def test_a_record_cut_short_goes_once_nobody_can_be_writing_it(site: Ended, torn: str) -> None:
    """XFS leaves zeros after a power cut."""
    site.run_job(0)
    place = site.state / "owed/beef"
    place.write_text(TORN[torn])
    site.write()
    assert site.owed() == ["beef", "feed"]
    os.utime(place, (1, 1))
    site.write()
    assert (site.owed(), site.told) == (["feed"], [])


def test_of_a_claim_before_a_reboot_without_its_record_no_time_is_known(site: Ended) -> None:
    site.run_job(0, ago=DAY)
    (site.state / "owed/feed").unlink()
    site.reboot(wiped=False)
    node = site.node()
    site.history.run(node, reconcile_locks(node, make_liveness_judge(node), soon()), 1e6)
    (found,) = site.lines()
    assert (found["how"], found["held_seconds"], found["gpu_seconds"]) == ("reap", None, None)
    assert found["devices"][0]["held_seconds"] is None


def test_a_lock_of_an_earlier_boot_that_stands_is_not_seen_to_be_held(site: Ended) -> None:
    own = site.run_job(0)
    os.utime(site.state / "owed/feed", (1, 1))
    site.proc.boot(OTHER_BOOT)
    see_held(site, Verdict(UNKNOWN, ""))
    assert (site.state / "owed" / own.token).stat().st_mtime == 1
