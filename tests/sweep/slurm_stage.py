# SPDX-License-Identifier: Apache-2.0
"""A node of a Slurm that is played: slurmd, a step daemon, and what slurmctld would answer.

The parent of Prolog and Epilog is a process called slurmd; the TaskProlog runs as the job's user,
and its parent shows the title of a step. squeue, scontrol and scancel are scripts that answer from
files, and write down what they were told.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpulock.slurm.note import task_note_path
from gpulock.slurm.scontrol import COLUMNS, INVALID
from tests.support.scene import configured
from tests.support.slurm_calls import SLURMD, USER, SlurmJob, users_settings, write_map
from tests.support.starter import Starter
from tests.sweep.stage import OTHER, Stage

SQUEUE = """\
#!/bin/sh
for word; do [ "$last" = -j ] && job=$word; last=$word; done
[ -e {answers}/"$job" ] && exec cat {answers}/"$job"
echo 'slurm_load_jobs error: {invalid}' >&2
exit 1
"""
OBEY = """\
#!/bin/sh
echo "${{0##*/}} $*" >>{told}
"""


class SlurmStage(Stage):
    """Jobs of one user. Of OTHER a step daemon shows, all the time.

    `selection` is who picks the devices: slurm or gpulock. `gres` is what each job asked for, and
    `shared` the GRES by which it gets a part of a device.
    """

    gres, shared = "N/A", ""

    def __init__(self, root: Path, selection: str) -> None:
        super().__init__(root)
        self.selection = selection
        out = root / "out"
        out.mkdir()
        out.chmod(0o777)  # strace writes as the job's user
        self.log = out / "strace.log"
        self._answers = root / "answers"
        self._answers.mkdir()
        self._told = root / "told"
        self._program(root / "bin/squeue", SQUEUE)
        for name in ("scontrol", "scancel"):
            self._program(root / "bin" / name, OBEY)
        with self.scene.config.open("a") as file:
            file.write(f"SLURM_BINARIES={root / 'bin'}\nSLURM_DEVICE_SELECTION={selection}\n")
            file.write("SLURM_SHARDS=share\n")
            file.write(
                "SLURM_WAIT=0.000001\n"
            )  # one that is refused asks once, however slow this machine is
        self.node = self.scene.node()
        write_map(self.node, self.scene.root / "gres.conf", self.shared)
        settings = users_settings(self.scene.config.read_text())
        self.task_config = self.scene.config.with_name("task.conf")
        hooks = self.scene.hooks.folder
        self._prolog, self._epilog = hooks / "prolog/slurm", hooks / "epilog/slurm"
        self._task = configured(self.scene, hooks / "prolog/slurm-task", "task", settings)
        self._slurmd = Starter(root, "slurmd")
        self._stepd = Starter(root, "slurmstepd", self.job(OTHER).title("extern"))
        self._tasks: dict[str, Starter] = {}
        for process in (self._slurmd, self._stepd):
            self.link(process.pid)

    def close(self) -> None:
        """End slurmd and the step daemons."""
        for process in (self._slurmd, self._stepd, *self._tasks.values()):
            process.end()

    def job(
        self, number: int, positions: str = "", *, leader: int = 0, batch: bool = True
    ) -> SlurmJob:
        """Describe a job of the user."""
        masked = self.selection == "slurm"
        return SlurmJob(number, positions, is_masked=masked, leader=leader, batch=batch)

    def prolog(self, job: SlurmJob, head: Sequence[str] = ()) -> int:
        """Run the Prolog of a job, behind `head`; return the exit code."""
        return self.by_slurmd([*head, str(self._prolog)], job.prolog())

    def epilog(self, job: SlurmJob, head: Sequence[str] = ()) -> int:
        """Run the Epilog of a job, behind `head`; return the exit code."""
        return self.by_slurmd([*head, str(self._epilog)], job.epilog(gpus=False))

    def by_slurmd(self, argv: Sequence[str], env: Mapping[str, str]) -> int:
        """Run a program as a child of slurmd; return the exit code."""
        self.log.unlink(missing_ok=True)
        return self._slurmd.run(argv, env, proc=str(self.proc), stderr=str(self.stderr)).status

    def task(
        self, job: SlurmJob, env: Mapping[str, str], step: str, head: Sequence[str] = ()
    ) -> int:
        """Run the TaskProlog of a step behind `head`; return the exit code. `stderr` has its words.

        It takes the job from the title of its parent: strace has it where there is one.
        """
        self.log.unlink(missing_ok=True)
        title = job.title(step)
        if title not in self._tasks:
            self._tasks[title] = Starter(self.proc.parent, "python", title)
            self.link(self._tasks[title].pid)
        argv = [title, *head[1:], self._task] if head else [self._task]
        return (
            self._tasks[title]
            .run(
                argv,
                env,
                proc=str(self.proc),
                stderr=str(self.stderr),
                program=head[0] if head else "",
                uid=USER,
            )
            .status
        )

    def answer(self, job: SlurmJob, state: str) -> None:
        """Let slurmctld say this of a job."""
        told = {
            "JobID": str(job.id),
            "UserID": str(USER),
            "State": state,
            "RestartCnt": str(job.restart),
            "ArrayJobID": str(job.id),
            "BatchFlag": str(int(job.batch)),
            "tres-per-node": self.gres,
        }
        row = "".join(told.get(name, "N/A").ljust(width) for name, _, width in COLUMNS)
        (self._answers / str(job.id)).write_text(f"{row}\n")

    def forget(self, job: SlurmJob) -> None:
        """Let slurmctld know nothing of a job."""
        (self._answers / str(job.id)).unlink(missing_ok=True)

    def told(self) -> list[str]:
        """Return what scontrol and scancel were told since the last time."""
        try:
            lines = self._told.read_text().splitlines()
            self._told.unlink()
        except FileNotFoundError:
            return []
        return lines

    def note(self, job: SlurmJob) -> Path:
        """Return where the note of a job is, if it has one."""
        return Path(task_note_path(self.node.store.root, SLURMD, str(job.id)))

    def lose_locks(self) -> None:
        """Let all locks be removed; their records stand."""
        shutil.rmtree(self.node.store.locks_dir)

    def leave_process(self, job: SlurmJob) -> Path:
        """Leave a process in the cgroup of a job; return the file that says so."""
        top = Path(self.node.settings.sys_root, "fs/cgroup/freezer/slurm")
        folder = top / f"uid_{USER}/job_{job.id}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.procs").write_text("4000000\n")
        return folder / "cgroup.procs"

    def _program(self, path: Path, text: str) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.format(answers=self._answers, told=self._told, invalid=INVALID))
        path.chmod(0o755)


def tasks_environment(said: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what slurmstepd makes of a TaskProlog's output; raise ValueError for a strange line.

    It passes over lines that it does not know; a TaskProlog that means what it says has none.
    """
    found = dict(environ)
    for line in said.splitlines():
        word, _, rest = line.partition(" ")
        name, equals, value = rest.partition("=")
        if word == "export" and equals:
            found[name] = value
        elif word == "unset" and name:
            found.pop(name, None)
        elif word != "print":
            raise ValueError(f"slurmstepd passes over {line!r}")
    return found


class ShardStage(SlurmStage):
    """Every job asks for a shard of each of its devices."""

    gres, shared = "gres:shard:2", "shard"
