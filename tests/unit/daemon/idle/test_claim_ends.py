# SPDX-License-Identifier: Apache-2.0
"""A claim whose end was chosen is given back then, or stays held by what still uses it."""

from __future__ import annotations

import os
import pty
from pathlib import Path

import pytest

from gpulock.alloc.process_owner import NAMED, RUN
from gpulock.daemon.idle import claim_ends
from gpulock.daemon.idle.claim_ends import AGAIN, BEFORE, ClaimEnds, tell_terminal
from gpulock.daemon.idle.policy import IdlePolicy
from gpulock.daemon.reconcile.reconcile import reconcile_locks
from gpulock.node.context import Node
from gpulock.store.owner import Owner
from tests.support.faults import raising
from tests.support.journal import HeardJournal
from tests.support.locks import place_lock
from tests.support.scripts import write_script
from tests.support.trees import Box, bus, judge_of, record, soon
from tests.support.wait import wait_until

ALICE, SHELL, END = 2001, 901, 10_000.0


class Site:
    """A node where alice's shell holds a GPU until END."""

    def __init__(self, root: Path, **claim: object) -> None:
        self.box = Box(root)
        self.box.proc.add(SHELL, "bash", start=9, uids=(ALICE,) * 4)
        self.node: Node = self.box.node()
        self.node.store.check(make=True)
        self.journal = HeardJournal()
        self.told: list[str] = []
        self.next_at = 0.0
        self.idle = IdlePolicy(self.told.append)
        self.ends = ClaimEnds(self.journal, self.idle.tell_end)
        fields: dict[str, object] = {"scheduler": "process", "job_id": str(SHELL), "pid": SHELL}
        fields |= {"start": 9, "uid": ALICE, "user": "alice", "add_grp_id": 0}
        self.claim = record(
            **fields, **{"token": "t1", "devices": (bus(0),), "until": END, **claim}
        )
        place_lock(self.node.store, bus(0), self.claim)

    def tell(self, _: Node, owner: Owner, text: str) -> None:
        """Be the terminal."""
        self.told.append(f"{owner.user}: {text}")

    def go(self, now: float) -> list[str]:
        """Let a reconcile come; return what is held then."""
        report = reconcile_locks(self.node, judge_of(self.node), soon())
        self.idle.run(self.node, report, now)
        self.ends.run(self.node, report, now)
        self.next_at = report.next_at
        self.idle.run_due(now)
        return self.box.locks()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    monkeypatch.setattr(claim_ends, "tell_terminal", made.tell)
    return made


def test_a_claim_is_given_back_at_its_end_and_not_before(site: Site) -> None:
    assert site.go(END - 1) == [bus(0)]
    assert site.next_at == END
    assert site.go(END) == []
    assert site.told[-1].startswith("alice: your claim of GPU 0 is over: unset CUDA_VIS")


def test_its_user_is_told_once_ten_minutes_before(site: Site) -> None:
    for now in (END - BEFORE - 1, END - BEFORE, END - BEFORE + 30):
        site.go(now)
    assert site.told == ["alice: your claim of GPU 0 ends in 10 min; what still runs keeps it"]


@pytest.mark.parametrize(
    ("claim", "now"),
    [({"until": 0.0}, END), ({"claimed_boottime": END - BEFORE}, END - BEFORE + 1)],
    ids=["it has none", "it was just made"],
)
def test_no_end_of_a_claim_is_told(tmp_path: Path, claim: dict[str, object], now: float) -> None:
    site = Site(tmp_path, **claim)
    assert (site.go(now), site.told) == ([bus(0)], [])


def test_a_claim_that_is_still_used_stays_held_until_it_is_not(site: Site) -> None:
    site.box.proc.add(902, uids=(ALICE,) * 4, fds={3: site.box.dev / "nvidia0"})
    assert site.go(END) == [bus(0)]
    held = "GPU 0 of pid 901 (alice) is held beyond its end: "
    assert f"{held}process 902" in str(site.journal.said())
    assert site.next_at >= END + AGAIN
    site.box.proc.remove(902)
    assert site.go(END + 1) == [bus(0)]  # it is not looked at without a pause
    assert site.go(site.next_at) == []


def test_a_claim_that_cannot_be_given_back_is_told_with_the_reason(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_ends, "release_unused", raising(OSError(30, "Read-only file system")))
    assert site.go(END) == [bus(0)]
    assert "beyond its end: [Errno 30] Read-only file system" in str(site.journal.said())


@pytest.mark.parametrize(
    ("sid", "environ"), [(SHELL, b""), (1, b"GPULOCK_CLAIM=t1\0")], ids=["its group", "its mark"]
)
def test_what_was_started_in_it_keeps_it_without_an_open_device(
    tmp_path: Path, sid: int, environ: bytes
) -> None:
    site = Site(tmp_path, sid=SHELL)
    site.box.proc.add(902, uids=(ALICE,) * 4, session=sid)
    (site.box.proc.root / "902/environ").write_bytes(environ)
    assert site.go(END) == [bus(0)]
    site.box.proc.remove(902)
    assert site.go(site.next_at) == []


@pytest.mark.parametrize("comment", [RUN, NAMED])
def test_a_process_that_is_the_work_keeps_its_claim(tmp_path: Path, comment: str) -> None:
    site = Site(tmp_path, comment=comment)
    assert site.go(END + 1) == [bus(0)]
    assert "beyond its end" in str(site.journal.said())
    site.box.proc.remove(SHELL)
    assert site.go(END + 2) == []


def test_idle_command_is_run_before_the_end(tmp_path: Path) -> None:
    site = Site(tmp_path)
    write_script(tmp_path / "told", f'echo "$1 $GPULOCK_USER" >> {tmp_path}/said')
    site.node.settings.idle_command = f"{tmp_path}/told"
    site.go(END - 60)
    wait_until((tmp_path / "said").exists, why="the command to run")
    site.idle.close()
    assert (tmp_path / "said").read_text() == "end alice\n"


def test_a_terminal_is_written_to_where_it_is_its_users_alone(tmp_path: Path) -> None:
    site = Site(tmp_path)
    leader, follower = pty.openpty()
    device = os.fstat(follower).st_rdev
    number = os.minor(device) & 0xFF | os.major(device) << 8 | os.minor(device) >> 8 << 20
    path = site.box.proc.root / str(SHELL) / "stat"
    head, _, rest = path.read_text().rpartition(")")
    fields = rest.split()
    fields[4] = str(number)
    path.write_text(f"{head}) {' '.join(fields)}\n")
    tell_terminal(site.node, site.claim, "of another user")
    tell_terminal(site.node, site.claim.copy(uid=os.fstat(follower).st_uid), "your claim")
    assert os.read(leader, 999).decode().strip() == "gpulock: your claim"
    for fd in (leader, follower):
        os.close(fd)
