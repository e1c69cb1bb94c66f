# SPDX-License-Identifier: Apache-2.0
"""What the power is cut in: claims and releases, by the hooks of both schedulers and without."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from gpulock.alloc.choose import ClaimRequest
from gpulock.alloc.release import release_locks
from gpulock.sge import epilog, prolog
from gpulock.store import atomic, grants
from gpulock.store.owner import Owner
from gpulock.workstation.process_claims import claim_for_process, make_process_owner
from tests.support import jobs, slurm_site
from tests.support.faults import disk_full
from tests.support.power_log import Log, Recorder, recording
from tests.support.power_model import Remainder
from tests.support.power_node import PoweredNode
from tests.support.trees import Box, judge_of, soon

PID = 700  # a process that claims, and ends
GPUS = 3


class Case(NamedTuple):
    """What was recorded, and what must hold of each remainder."""

    log: Log
    check: Callable[[Remainder], None]


def fresh_node(root: Path, kept: bool) -> PoweredNode:
    """Return a node that was never used."""
    made = PoweredNode(Box(root, GPUS), kept=kept)
    made.boot()
    return made


def used_node(root: Path, kept: bool) -> PoweredNode:
    """Return a node that was used before."""
    made = fresh_node(root, kept)
    made.reconcile()
    return made


def claim(powered: PoweredNode, count: int) -> Owner:
    """Let a process claim as `gpulock run` does."""
    powered.box.proc.add(PID, "python", uids=(os.geteuid(),) * 4)
    node = powered.node()
    own = make_process_owner(node, PID, "alice")
    grant = claim_for_process(node, own, ClaimRequest(count), soon())
    powered.made.add(grant.owner.token)
    return grant.owner


def end(powered: PoweredNode, own: Owner) -> None:
    """Let the process end, and release what it held."""
    powered.box.proc.remove(PID)
    node = powered.node()
    done = release_locks(node, lambda o: o.token == own.token, judge_of(node), soon(), "release")
    assert len(done.freed) == len(own.devices)


def keep(powered: PoweredNode, disk: Recorder, token: str) -> None:
    """Let the record of a claim reach the disk: from now on its line is due."""
    pending = powered.box.state / grants.OWED
    disk.settle(powered.box.state, pending, pending / token)
    disk.tell(f"kept {token}")


def first_claim(root: Path, kept: bool) -> Case:
    """Claim for the first time on a node."""
    powered = fresh_node(root, kept)
    with recording(*powered.roots()) as disk:
        claim(powered, 2)
    return Case(disk.finish(), powered.check)


def claim_to_history(root: Path, kept: bool) -> Case:
    """Claim, release, claim again, and write the history; the first claim is half a minute old."""
    powered = used_node(root, kept)
    with recording(*powered.roots()) as disk:
        own = claim(powered, 1)
        disk.settle()
        disk.tell(f"kept {own.token}")
        end(powered, own)
        other = claim(powered, 2)
        powered.reconcile()
        end(powered, other)
        powered.reconcile()
        disk.tell(f"kept {other.token}")
    return Case(disk.finish(), powered.check)


def second_cut(root: Path, kept: bool) -> Case:
    """Come up after a power cut that ended a claim."""
    powered = used_node(root, kept)
    own = claim(powered, 1)
    powered.boot()
    with recording(*powered.roots(), told=[f"kept {own.token}"]) as disk:
        claim(powered, 2)
        powered.reconcile()
    return Case(disk.finish(), powered.check)


def full_disk(root: Path, kept: bool) -> Case:
    """Claim where STATE_DIR has no room for a copy of the record; then there is room again."""
    powered = used_node(root, kept)
    create = atomic.create_file

    def full(path: str, data: bytes) -> None:
        if path.startswith(str(powered.box.state)):
            disk_full()
        create(path, data)

    with recording(*powered.roots()) as disk:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(atomic, "create_file", full)
            own = claim(powered, 1)
        end(powered, own)
        powered.reconcile()
        disk.tell(f"kept {own.token}")
        claim(powered, 1)
    return Case(disk.finish(), powered.check)


def slurm_hooks(root: Path, kept: bool) -> Case:
    """Run Slurm's Prolog and Epilog, and a round."""
    site = slurm_site.Site(root, GPUS)
    powered = PoweredNode(site, kept=kept)
    powered.boot()
    with recording(*powered.roots()) as disk:
        assert site.prolog(12, "0,1") == slurm_site.RUN
        keep(powered, disk, note_holder(powered))
        site.epilog(12, "0,1")
        powered.reconcile()
    assert powered.locks() == []
    return Case(disk.finish(), powered.check)


def sge_hooks(root: Path, kept: bool) -> Case:
    """Run Grid Engine's prolog and epilog, and a round."""
    site = jobs.Site(root, GPUS)
    powered = PoweredNode(site, kept=kept)
    powered.boot()
    with pytest.MonkeyPatch.context() as patch:
        jobs.child_of(patch, site)
        job = site.run(jobs.gpus(2))
        powered.spool = job.folder
        words, environ, config = ["sge", str(site.pid)], site.environ(job), site.config()
        with recording(*powered.roots()) as disk:
            assert prolog.main(words, environ, config) == 0
            keep(powered, disk, note_holder(powered))
            assert epilog.main(words, environ, config) == 0
            site.proc.remove(site.pid)
            powered.reconcile()
    assert powered.locks() == []
    return Case(disk.finish(), powered.check)


def note_holder(powered: PoweredNode) -> str:
    """Take in the claim that stands; return its token."""
    (token,) = {lock.owner.token for lock in powered.locks() if lock.owner}
    powered.made.add(token)
    return token
