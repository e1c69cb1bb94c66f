# SPDX-License-Identifier: Apache-2.0
"""How long the hooks take as whole processes: `make bench`.

Usage: python -m tests.bench.hooks [ROUNDS]. Beside them run a bare interpreter, the floor, and a
prolog and an epilog in shell, as sites write them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.bench.harness import (
    CPU,
    Act,
    Samples,
    Target,
    print_rows,
    ratio_target,
    run_bench,
    run_rounds,
    take_locks_away,
)
from tests.support.scene import Scene, configured, linked_proc
from tests.support.slurm_calls import USER, SlurmJob, users_settings, write_map
from tests.support.starter import Shepherd, Starter

PEER, PEER_EPILOG = (str(Path(__file__).with_name(name)) for name in ("peer.sh", "peer_epilog.sh"))
QSTAT_ANSWER = "job_number:  1\nowner:  user\nhard resource_list:         gpu=2\n"
SLURM_JOB = SlurmJob(2001, "0,1")
# row, what it is compared with, limit; "alone": with one process to look at, not the machine's
LIMITS = (
    ("prolog", "floor", 1.45),
    ("prolog", "shell prolog", 1.0),
    ("epilog, alone", "floor", 1.45),
    ("slurm prolog", "floor", 1.45),
    ("slurm task", "floor", 1.45),
    ("slurm epilog, alone", "floor", 1.45),
)


class Step(NamedTuple):
    """A program that is run to its end; without a `row` it is not measured.

    After it `locks` devices are locked.
    """

    row: str
    parent: Starter
    argv: Sequence[str]
    env: Mapping[str, str]
    locks: int = 0


def act(scene: Scene, samples: Samples, *steps: Step) -> Act:
    """Return an act of a round: steps one after the other, on one node."""

    def run() -> None:
        for row, parent, argv, env, locks in steps:
            ended = parent.run(argv, env)
            if ended.status != 0:
                raise RuntimeError(f"{row or argv[0]} exits {ended.status}")
            locked = len(list(Path(scene.node().store.locks_dir).glob("*")))
            if locked != locks:
                raise RuntimeError(f"after {argv[0]} {locked} devices are locked, not {locks}")
            if row:
                samples.setdefault(row, []).append(ended.nanoseconds / 1e6)
                samples.setdefault(row + CPU, []).append(ended.cpu_nanoseconds / 1e6)

    return run


def restorer(scene: Scene, shepherd: Shepherd) -> Act:
    """Return what puts the node of a Grid Engine job back to before its prolog."""
    environment, peer = shepherd.job.folder / "environment", scene.root / "peer"
    text = environment.read_bytes()
    peer.mkdir()

    def restore() -> None:
        take_locks_away(scene.node())
        environment.write_bytes(text)
        for lock in peer.iterdir():
            lock.rmdir()

    return restore


def alone(scene: Scene, hook: Path, pid: int) -> str:
    """Return a variant of a hook that sees one process, instead of all of this machine."""
    proc = linked_proc(scene.root / "proc-alone", (pid,))
    return configured(scene, hook, "alone", f"{scene.config.read_text()}PROC_ROOT={proc}\n")


def grid_engine(scene: Scene, shepherd: Shepherd, samples: Samples) -> list[Act]:
    """Return the claims and releases of a job under Grid Engine: plainly, and as configured."""
    env, pid = shepherd.job.hook_environ(), str(shepherd.pid)
    prolog, epilog = str(scene.hooks.prolog), str(scene.hooks.epilog)
    start = str(scene.hooks.drop_env)
    job = (env["JOB_ID"], env["SGE_TASK_ID"], env["QUEUE"])

    def pair(suffix: str, claim: Sequence[str], release: Sequence[str]) -> Act:
        rows = (f"prolog{suffix}", f"epilog{suffix}")
        steps = Step(rows[0], shepherd, claim, env, 2), Step(rows[1], shepherd, release, env)
        return act(scene, samples, *steps)

    return [
        pair("", [prolog, pid], [epilog, pid]),
        pair("+drop-env", [start, prolog, *job], [start, epilog, *job]),
    ]


def beside(scene: Scene, shepherd: Shepherd, samples: Samples) -> list[Act]:
    """Return what Grid Engine's hooks are held against, and the epilog that sees one process."""
    env, pid = shepherd.job.hook_environ(), str(shepherd.pid)
    locks, answer = scene.root / "peer", scene.root / "qstat.txt"
    answer.write_text(QSTAT_ANSWER)
    gpus = str(len(scene.simulated.machine.gpus))
    lone = alone(scene, scene.hooks.epilog, shepherd.pid)
    floor = [scene.interpreter, "-IS", "-c", "pass"]
    return [
        act(scene, samples, Step("floor", shepherd, floor, env)),
        act(
            scene,
            samples,
            Step("", shepherd, [str(scene.hooks.prolog), pid], env, 2),
            Step("epilog, alone", shepherd, [lone, pid], env),
        ),
        act(
            scene,
            samples,
            Step("shell prolog", shepherd, [PEER, str(locks), str(answer), gpus], env),
            Step("shell epilog", shepherd, [PEER_EPILOG, str(locks)], env),
        ),
    ]


def slurm(scene: Scene, slurmd: Starter, task: Starter, samples: Samples) -> list[Act]:
    """Return a job's hooks under Slurm, which chooses the devices, as is the default."""
    write_map(scene.node(), scene.root / "gres.conf")
    hooks = scene.hooks
    own = users_settings(scene.config.read_text())
    task_prolog = configured(scene, hooks.slurm_task, "task", own)
    lone = alone(scene, hooks.slurm_epilog, slurmd.pid)
    prolog, epilog = [str(hooks.slurm_prolog)], [str(hooks.slurm_epilog)]
    before, after = SLURM_JOB.prolog(), SLURM_JOB.epilog()
    return [
        act(
            scene,
            samples,
            Step("slurm prolog", slurmd, prolog, before, 2),
            Step("slurm task", task, [task_prolog], SLURM_JOB.task(), 2),
            Step("slurm epilog", slurmd, epilog, after),
        ),
        act(
            scene,
            samples,
            Step("", slurmd, prolog, before, 2),
            Step("slurm epilog, alone", slurmd, [lone], after),
        ),
    ]


def measure(root: Path, rounds: int) -> list[Target]:
    """Print the milliseconds of every row; return the targets. Each scheduler has its own node."""
    sge_scene, slurm_scene, samples = Scene(root), Scene(root / "slurm"), Samples()
    with (
        Shepherd(sge_scene.spool(1, 2)) as shepherd,
        Starter(slurm_scene.root, "slurmd") as slurmd,
        Starter(slurm_scene.root, "python", SLURM_JOB.title(), USER) as task,
    ):
        acts = [
            *grid_engine(sge_scene, shepherd, samples),
            *beside(sge_scene, shepherd, samples),
            *slurm(slurm_scene, slurmd, task, samples),
        ]

        restore = restorer(sge_scene, shepherd)

        def restore_both() -> None:
            restore()
            take_locks_away(slurm_scene.node())

        run_rounds(acts, samples, rounds, restore_both)
    title = f"whole processes, {rounds} rounds; floor: {sge_scene.interpreter} -IS -c pass"
    print_rows(title, {row: samples[row] for row in sorted(samples)}, "floor")
    return [ratio_target(samples, *limit) for limit in LIMITS]


if __name__ == "__main__":
    count = int(sys.argv[1]) if sys.argv[1:] else 41
    sys.exit(run_bench("hooks", lambda root: measure(root, count)))
