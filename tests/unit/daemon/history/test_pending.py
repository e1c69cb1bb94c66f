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
from gpulock.report.scan import HistoryFaults
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
    elsewhere, own = site.root / "elsewhere", record(token="feed")
    elsewhere.write_text(owner.encode_owner(own))
    os.utime(elsewhere, (1, 1))
    (site.state / "owed").mkdir()
    (site.state / "owed/feed").symlink_to(elsewhere)
    site.write()
    assert (site.tokens(), len(site.told)) == ([], 1)
    pending.touch_last_seen(str(site.state), [own], clock_boottime())
    assert elsewhere.stat().st_mtime == 1


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


@pytest.mark.parametrize(("off", "wiped"), [(0.0, False), (7 * DAY, False), (0.0, True)])
def test_a_claim_that_stood_when_the_node_went_down_is_one_line_without_the_time_it_was_off(
    site: Ended, off: float, wiped: bool
) -> None:
    """Neither by this boot's clock, which says nothing of the other's, nor by the calendar's."""
    own = site.run_job(0, 1, ago=DAY + off, queue="gpu.q")
    seen = own.claimed_at + DAY
    os.utime(site.state / "owed/feed", (seen, seen))
    site.reboot(wiped=wiped)
    node = site.node()
    released = reconcile_locks(node, make_liveness_judge(node), soon())
    unread = HistoryFaults()
    told = [claim.record for claim in find_local_claims(node, lambda _: True, unread)]
    assert (len(told), unread.files) == (1, [])
    for _ in range(2):
        site.history.run(node, released, 1e6)
    (found,) = site.lines()
    for one in (*told, found):
        assert one["held_seconds"] == pytest.approx(DAY, abs=0.01)
        assert one["gpu_seconds"] == pytest.approx(2 * DAY, abs=0.01)
        assert one["released_at"] == pytest.approx(seen, abs=0.01)
    about = [found[key] for key in ("token", "user", "queue", "gpus", "busy_seconds", "shapes")]
    assert about == ["feed", "alice", "gpu.q", 2, None, {}]
    assert f"{found['how']}: {found['proof']}" == pending.REBOOT_PROOF
    assert [(one["id"], one["minor"]) for one in found["devices"]] == [(bus(0), 0), (bus(1), 1)]
    assert (site.owed(), site.told) == ([], [])


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


def test_gpulockd_notes_which_claims_of_this_boot_stand(site: Ended) -> None:
    path, gone = site.state / "owed/feed", site.state / "owed/gone"
    own = site.run_job(0)
    site.run_job(1, token="gone")
    for one in (path, gone):
        os.utime(one, (1, 1))
    see_held(site, Verdict(ALIVE, ""))
    assert path.stat().st_mtime > own.claimed_at
    assert gone.stat().st_mtime == 1
    os.utime(path, (1, 1))
    site.proc.boot(OTHER_BOOT)
    see_held(site, Verdict(UNKNOWN, ""))
    assert path.stat().st_mtime == 1


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
    total.add(None, None, 0.0)
    total.add(0.0, 1.0, None)  # nobody writes it; it costs itself alone
    assert (total.held, total.busy, total.observed) == (0.0, 0.0, 0.0)


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


@pytest.mark.parametrize("text", ["\x01" * 700, owner.encode_owner(record(token="dead"))])
def test_a_record_that_makes_no_sense_is_told_once_and_holds_up_nobody(
    site: Ended, text: str
) -> None:
    site.run_job(0)
    place = site.state / "owed/beef"
    place.write_text(text)
    site.reboot()
    assert (site.write(), site.write()) == (1, 0)
    assert site.tokens() == ["feed"]
    (told,) = site.told
    assert told.startswith(f"{place} cannot be read: ")


WHOLE = owner.encode_owner(record(token="beef", devices=(bus(1), bus(2))))


@pytest.mark.parametrize("torn", ["", WHOLE[:-9], WHOLE[:200] + "\0" * (len(WHOLE) - 200)])
def test_a_record_cut_short_goes_once_nobody_can_be_writing_it(site: Ended, torn: str) -> None:
    """XFS leaves zeros after a power cut."""
    site.run_job(0)
    place = site.state / "owed/beef"
    place.write_text(torn)
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
