# SPDX-License-Identifier: Apache-2.0
"""Grid Engine's count goes down and up in step, though processes are killed in between."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.slots import sge
from gpulock.daemon.slots.sge import (
    DONE,
    THEIRS,
    WANTED,
    LoweredCount,
    SgeSlotSync,
    booked_complex_amount,
    next_sync_step,
    parse_quarantined_counts,
)
from gpulock.node.settings import Settings
from tests.support.journal import HeardJournal
from tests.support.trees import Box

QCONF = """\
#!/bin/sh
cd {root}
case "$1" in
-se)
    test -e "$2" || exit 1
    read count < "$2"
    echo "hostname $2"; echo "complex_values slots=16,gpu=$count" ;;
-mattr) test -e deaf && exit 1; echo "${{4#gpu=}}" > "$5" ;;
esac
"""
QHOST = "#!/bin/sh\ntest -e {root}/down && exit 1\nexec cat {root}/qhost.xml\n"
QSTAT = "#!/bin/sh\nexec cat {root}/qstat.xml\n"
HOST = """\
 <host name='{host}'>
   <hostvalue name='num_proc'>2</hostvalue>
   <resourcevalue name='gpu.quarantined' dominance='hl'>{bad}.000000</resourcevalue>
 </host>
"""
JOB = """\
    <job_list state="running">
      <JB_job_number>{number}</JB_job_number>
      <queue_name>gpu.q@{host}</queue_name>
      <slots>{slots}</slots>
      <hard_request name="gpu" resource_contribution="0.000000">{amount}</hard_request>
    </job_list>
"""


class Site:
    """A qmaster of files, and the chore of an admin host."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, text in (("qconf", QCONF), ("qhost", QHOST), ("qstat", QSTAT)):
            (root / name).write_text(text.format(root=root))
            (root / name).chmod(0o755)
        keys = {"SGE_ROOT": "/opt/sge", "SGE_BINARIES": str(root), "SGE_COUNT_HOSTS": "node1 node2"}
        self.box = Box(root / "box", 4, **keys)
        self.journal = HeardJournal()
        self.chore = SgeSlotSync(self.journal)
        self.now = 0.0
        self.count("node1", 4)
        self.count("node2", 8)
        self.bad(node1=0, node2=0)
        self.jobs()

    def count(self, host: str, number: int | None = None) -> int:
        """Set what qmaster counts, or return it."""
        if number is not None:
            (self.root / host).write_text(f"{number}\n")
        return int((self.root / host).read_text())

    def bad(self, **hosts: int) -> None:
        """Let the load sensors report this."""
        text = "".join(HOST.format(host=host, bad=bad) for host, bad in hosts.items())
        (self.root / "qhost.xml").write_text(f"<qhost>\n{text}</qhost>\n")

    def jobs(self, *jobs: tuple[str, int, int]) -> None:
        """Let jobs run: host, slots, GPUs a slot."""
        text = "".join(
            JOB.format(number=n, host=host, slots=slots, amount=amount)
            for n, (host, slots, amount) in enumerate(jobs)
        )
        (self.root / "qstat.xml").write_text(f"<job_info>{text}</job_info>\n")

    def round(self) -> None:
        """Let one round be asked for and answered."""
        for _ in range(2):
            self.now += sge.EVERY
            self.chore.run(self.box.node(), ReconcileReport([], []), self.now)
            asking = self.chore.asking
            assert asking is None or asking.wait(20.0)
        self.chore.run(self.box.node(), ReconcileReport([], []), self.now)

    def notes(self) -> dict[sge.Key, LoweredCount]:
        return sge.load_lowered_counts(str(self.box.state))

    def said(self) -> list[str]:
        return self.journal.said()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_while_all_is_well_nothing_is_changed_or_said(site: Site) -> None:
    site.round()
    assert (site.count("node1"), site.notes(), site.said()) == (4, {}, [])


def test_the_count_falls_with_each_device_that_is_out_and_comes_back(site: Site) -> None:
    site.bad(node1=1, node2=0)
    site.round()
    assert (site.count("node1"), site.count("node2")) == (3, 8)
    site.bad(node1=2, node2=1)
    site.round()
    assert (site.count("node1"), site.count("node2")) == (2, 7)
    assert site.notes()["node1", "gpu"] == LoweredCount(4, 2, 2, DONE)
    site.bad(node1=0, node2=0)
    site.round()
    assert (site.count("node1"), site.count("node2"), site.notes()) == (4, 8, {})
    assert len(site.said()) == 5


def test_it_never_falls_below_what_jobs_hold(site: Site) -> None:
    site.jobs(("node1", 1, 2), ("node1", 2, 1), ("node2", 1, 8))
    site.bad(node1=1)
    site.round()
    assert site.count("node1") == 4
    site.jobs(("node1", 1, 3))
    site.round()
    assert site.count("node1") == 3


def test_a_host_whose_sensor_does_not_tell_is_left_as_it_is(site: Site) -> None:
    site.bad(node1=1, node2=0)
    site.round()
    site.said()
    site.bad(node2=0)
    site.round()
    site.round()
    assert (site.count("node1"), site.count("node2")) == (3, 8)
    (line,) = site.said()
    assert "no load sensor reports how many devices of node1 are out" in line


def test_a_value_that_an_administrator_set_stands_and_is_told_once(site: Site) -> None:
    site.bad(node1=1, node2=0)
    site.round()
    site.said()
    site.count("node1", 2)
    for _ in range(3):
        site.round()
    assert site.count("node1") == 2
    (line,) = site.said()
    assert "gpu of node1: it was set to 2 by others" in line
    site.bad(node1=0)
    site.round()
    assert (site.count("node1"), site.notes()) == (2, {})


def test_a_host_that_is_no_longer_ours_to_keep_gets_back_what_it_had(site: Site) -> None:
    site.bad(node1=1, node2=0)
    site.round()
    site.box.settings["SGE_COUNT_HOSTS"] = ""
    site.round()
    assert (site.count("node1"), site.notes()) == (4, {})


def test_a_qmaster_that_is_down_is_told_once_and_asked_again(site: Site) -> None:
    site.bad(node1=1, node2=0)
    (site.root / "down").touch()
    site.round()
    site.round()
    assert (site.count("node1"), len(site.said())) == (4, 1)
    (site.root / "down").unlink()
    site.round()
    assert site.count("node1") == 3


def test_a_host_that_qmaster_does_not_know_keeps_no_other_from_its_count(site: Site) -> None:
    site.box.settings["SGE_COUNT_HOSTS"] = "alias node1"
    site.bad(node1=1)
    site.round()
    site.round()
    assert site.count("node1") == 3
    assert len([line for line in site.said() if "the count of alias is not updated" in line]) == 1


def test_a_host_that_may_not_change_counts_says_so_and_nothing_is_lost(site: Site) -> None:
    (site.root / "deaf").touch()
    site.bad(node1=1, node2=0)
    site.round()
    assert (site.count("node1"), site.notes()["node1", "gpu"].stage) == (4, WANTED)
    assert "the count of node1 is not updated: qconf -mattr failed" in site.said()[0]
    site.bad(node1=0)
    site.round()
    assert (site.count("node1"), site.notes()) == (4, {})


def test_notes_that_cannot_be_read_change_nothing(site: Site) -> None:
    (site.box.state / "sge-count").write_text("garbage\n")
    site.bad(node1=1)
    site.round()
    assert site.count("node1") == 4


class KilledError(Exception):
    """What a killed process does next: nothing."""


class Mortal:
    """A qmaster in memory, and a gpulockd that is killed before its n-th question or note."""

    def __init__(self, box: Box, patch: pytest.MonkeyPatch) -> None:
        self.settings = box.node().settings
        self.count, self.bad, self.left = 4, 1, 1000
        self.save = sge.save_lowered_counts

        def master(_: Settings) -> Mortal:
            return self

        patch.setattr(sge, "QmasterClient", master)
        patch.setattr(sge, "save_lowered_counts", self.note)

    def ask(self, *words: str) -> str:
        self.lives()
        if words[:2] == ("qconf", "-mattr"):
            self.count = int(words[4].removeprefix("gpu="))
        if words[0] == "qhost":
            return HOST.format(host="node1", bad=self.bad)
        return f"complex_values slots=16,gpu={self.count}\n" if words[0] == "qconf" else ""

    def note(self, state_dir: str, found: dict[sge.Key, LoweredCount]) -> None:
        self.lives()
        self.save(state_dir, found)

    def lives(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KilledError

    def round(self, left: int = 1000) -> None:
        self.left = left
        try:
            sge.sync_sge_counts(self.settings)
        except KilledError:
            assert left < 1000


@pytest.mark.parametrize("calls", range(9))
@pytest.mark.parametrize("ends", [1, 0])
def test_the_next_round_recovers_from_a_kill_between_any_two_steps(
    tmp_path: Path, calls: int, ends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed as it lowers, and as it raises; after the first the device is bad still, or good."""
    box = Box(tmp_path, SGE_ROOT="/opt/sge", SGE_COUNT_HOSTS="node1")
    mortal = Mortal(box, monkeypatch)
    mortal.round(calls)
    mortal.bad = ends
    mortal.round()
    mortal.round()
    assert mortal.count == 4 - ends
    mortal.bad = 0
    mortal.round(calls)
    mortal.round()
    mortal.round()
    assert mortal.count == 4
    assert sge.load_lowered_counts(str(box.state)) == {}


@given(
    st.lists(
        st.tuples(
            st.integers(0, 9), st.integers(0, 9), st.booleans(), st.booleans(), st.booleans()
        ),
        max_size=12,
    )
)
def test_nobody_but_an_administrator_ever_changes_what_is_there_when_all_is_well(
    events: list[tuple[int, int, bool, bool, bool]],
) -> None:
    """Each event: devices out, booked, whether a step is lost before or after qconf, or noted."""
    note, current = None, 8
    for bad, booked, lost_note, lost_set, lost_end in events:
        act = next_sync_step(note, current, min(bad, 8), booked)
        assert act.value is None or min(booked, 8) <= act.value <= 8
        if lost_note:
            continue
        note = act.note
        if act.value is None or lost_set:
            continue
        current = act.value
        if not lost_end:
            note = next_sync_step(note, current, min(bad, 8), booked).note
    for _ in range(2):
        act = next_sync_step(note, current, 0, 0)
        note, current = act.note, current if act.value is None else act.value
    assert current == 8
    assert next_sync_step(note, current, 0, 0).note is None


def test_an_administrators_value_is_left_alone_until_all_is_well() -> None:
    note = LoweredCount(8, 7, 7, DONE)
    theirs = next_sync_step(note, 5, 1, 0)
    assert theirs.note == LoweredCount(5, 5, 5, THEIRS) and theirs.value is None
    assert next_sync_step(theirs.note, 5, 2, 0).value is None
    assert next_sync_step(theirs.note, 5, 0, 0) == sge.SyncStep(None)
    assert next_sync_step(LoweredCount(8, 8, 7, DONE), 8, 1, 0).value is None  # put back by hand


def test_what_a_host_holds_is_read_from_qstat() -> None:
    text = "".join(
        JOB.format(number=1, host=host, slots=slots, amount=amount)
        for host, slots, amount in (("node1", 2, 1), ("node2", 1, 4), ("node1", 1, 3))
    )
    assert (
        booked_complex_amount(text, "node1", "gpu"),
        booked_complex_amount(text, "node2", "gpu"),
    ) == (5, 4)
    assert (
        booked_complex_amount(text, "node1", "gpuj"),
        booked_complex_amount(text, "node", "gpu"),
        booked_complex_amount("", "a", "gpu"),
    ) == (0,) * 3


@pytest.mark.parametrize("amount", ["1K", "1.5", "inf", "nan", "-3", "", "9" * 400, "\u0663"])
def test_what_a_user_may_write_for_a_number_keeps_the_count_up(site: Site, amount: str) -> None:
    job = JOB.format(number=1, host="node1", slots=1, amount=amount)
    (site.root / "qstat.xml").write_text(f"<job_info>{job}</job_info>\n")
    site.bad(node1=1, node2=1)
    site.round()
    assert (site.count("node1"), site.count("node2")) == (4, 7)


def test_what_a_sensor_reports_is_read_from_qhost() -> None:
    text = HOST.format(host="node1", bad=3) + "<host name='node2'><hostvalue/></host>"
    assert parse_quarantined_counts(text) == {"node1": 3}
    assert parse_quarantined_counts("") == {}
    for odd in ("many", "9" * 400, "9" * 5000, "-3", "."):
        assert parse_quarantined_counts(text.replace("3.000000", odd)) == {}


@pytest.mark.parametrize("text", ["a b=1 2 3\n", "a b=1 2 3 maybe\n", "a b=x 2 3 done\n", "ab\n"])
def test_notes_of_another_form_are_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        sge.parse_lowered_counts(text)


def test_notes_are_read_as_they_were_written() -> None:
    found = {
        ("node1", "gpu"): LoweredCount(8, 8, 7, WANTED),
        ("n2", "gpuj"): LoweredCount(4, 4, 4, DONE),
    }
    assert sge.parse_lowered_counts(sge.format_lowered_counts(found)) == found
