# SPDX-License-Identifier: Apache-2.0
"""A node of a Slurm cluster on a Box: slurmd's words, its step daemons, programs of our own.

squeue, scontrol and scancel are shell scripts that note how they were called and then say what a
test lets them say. Root is the user of the tests; the jobs are of users of other uids.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typing_extensions import Unpack

from gpulock.alloc.job_processes import JobProcesses, find_job_processes
from gpulock.alloc.process_scan import ProcessScan
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.slurm import epilog, note, prolog, task
from gpulock.slurm.call import SlurmHookCall
from gpulock.slurm.gres_map import gres_conf_version
from gpulock.slurm.note import TaskNote
from gpulock.slurm.steps import SlurmSteps
from gpulock.store.locks import Lock, list_names
from gpulock.store.owner import Owner
from tests.support.faults import returning
from tests.support.locks import place_lock
from tests.support.scripts import write_script
from tests.support.slurm_calls import SlurmJob
from tests.support.trees import About, Box, bus, record

ROOT = os.geteuid()
UID = ROOT + 2000
OTHER_UID = UID + 1
RUN, NODE_BROKEN = 0, 1
REQUEUE_EXIT = 213
STEPD = 800  # the process that becomes a task
SEPARATOR = "\x1f"
INVALID = "slurm_load_jobs error: Invalid job id specified"
SILENT = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


class Site(Box):
    """A node with slurmd, whose gres.conf lists the GPUs in order."""

    def __init__(self, root: Path, gpus: int = 4, **keys: str) -> None:
        self.binaries = root / "bin"
        self.sys = root / "sys"
        super().__init__(
            root,
            gpus,
            SLURM_BINARIES=str(self.binaries),
            SIMULATION=str(root / "marker"),
            **keys,
        )
        self.config()
        self.binaries.mkdir()
        for name in ("squeue", "scontrol", "scancel"):
            self.program(name, "exit 0")
        self.map(*[str(n) for n in range(gpus)])

    def set(self, **keys: str) -> None:
        """Change settings."""
        self.settings.update(keys)

    def node(self) -> Node:
        """Return the node as a hook that starts now sees it."""
        return Node(Settings(dict(self.settings)))

    def map(self, *places: str, gres_conf: str = "", shared: str = "") -> None:
        """Write which device each position is, in minors, as compared with gres.conf of now."""
        pairs = [("gres_conf", gres_conf), *[(str(n), place) for n, place in enumerate(places)]]
        pairs += [("shared", shared)] if shared else []
        pairs += [("gres_version", gres_conf_version(gres_conf))] if gres_conf else []
        text = "".join(f"{key}={value}\n" for key, value in pairs)
        (self.state / "slurm-map").write_text(f"gpulock-slurm-map 1\n{text}")

    def shuffled(self) -> None:
        """Let position, minor and index of the four cards all be different."""
        for number, minor in enumerate((3, 1, 0, 2)):
            self.gpu(bus(number), minor)
        self.map("2", "0", "3", "1")  # positions 0 1 2 3 are indexes 3 2 0 1

    def mig(self) -> list[str]:
        """Put the first card into MIG mode with two instances; return their ids."""
        told = [
            f"mig.{bus(0)}.gi{n}.ci0.{pair}"
            for n in (1, 2)
            for pair in (f"uuid=MIG-{n}", "profile=3g.40gb")
        ]
        self.inventory(f"gpu.{bus(0)}.mig=1", *told)
        return [f"{bus(0)}.gi1.ci0", f"{bus(0)}.gi2.ci0"]

    def apart(self, patch: pytest.MonkeyPatch) -> None:
        """Let Slurm's programs be ours where the settings cannot be read, too: no real node is
        ever drained.
        """
        default = Settings({"SLURM_BINARIES": str(self.binaries)})
        patch.setattr(prolog, "Settings", returning(default))

    def program(self, name: str, body: str) -> None:
        """Put a program in the place of one of Slurm's; it notes its arguments first."""
        noted = f'{{ printf "{name}"; printf "\\037%s" "$@"; echo; }} >>{self.root}/calls'
        write_script(self.binaries / name, f"{noted}\n{body}")

    def answers(self, *rows: str) -> None:
        """Let squeue know these jobs."""
        (self.root / "answer").write_text("".join(f"{row}\n" for row in rows))
        self.program("squeue", f"exec cat {self.root}/answer")

    def fails(self, words: str, *names: str) -> None:
        """Let programs fail with some words."""
        for name in names or ("squeue",):
            self.program(name, f"echo '{words}' >&2; exit 1")

    def calls(self) -> list[list[str]]:
        """Return how Slurm's programs were called."""
        path = self.root / "calls"
        text = path.read_text() if path.exists() else ""
        return [line.split(SEPARATOR) for line in text.splitlines()]

    def drained(self) -> list[str]:
        """Return the reasons for which this node was drained."""
        orders = [
            c for c in self.calls() if c[:2] == ["scontrol", "update"] and "JobId" not in c[2]
        ]
        assert all(c[2:4] == ["NodeName=n1", "State=DRAIN"] for c in orders)
        return [c[4].removeprefix("Reason=") for c in orders]

    def environ(self, job: int = 12, /, gpus: str | None = "0,1", **changes: str) -> dict[str, str]:
        """Return what slurmd gives to Prolog and Epilog (docs/facts/slurm.md)."""
        found = SlurmJob(job, gpus or "").prolog()
        conf = str(self.root / "slurm.conf")  # none: no real cluster is ever meant
        found |= {"SLURM_CONF": conf, "SLURM_JOB_UID": str(UID), "SLURM_JOB_USER": "alice"}
        return found | changes | ({"SLURM_JOB_GPUS": ""} if gpus == "" else {})

    def prolog(self, job: int = 12, /, gpus: str | None = "0,1", **changes: str) -> int:
        """Run the Prolog of a job; return its exit code."""
        return prolog.main(self.environ(job, gpus, **changes), self.config())

    def epilog(self, job: int = 12, /, gpus: str | None = "0,1", **changes: str) -> None:
        """Run the Epilog of a job, which must end with 0."""
        context = {"SLURM_SCRIPT_CONTEXT": "epilog_slurmd", **changes}
        assert epilog.main(self.environ(job, gpus, **context), self.config()) == 0

    def call(self, job: int = 12, /, gpus: str | None = "0,1", **changes: str) -> SlurmHookCall:
        """Return how slurmd calls a hook."""
        return SlurmHookCall(self.environ(job, gpus, **changes))

    def task(self, **environ: str) -> int:
        """Run the TaskProlog below the process that becomes the task."""
        return task.main({"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "12", **environ}, self.config())

    def note(self, job: int = 12, slurmd: str = "n1") -> TaskNote:
        """Return what the tasks of a job are told."""
        found = note.find_task_note(str(self.records), slurmd, str(job))
        assert found is not None
        return found

    def notes(self) -> list[str]:
        """Return the names of all notes."""
        folder = self.records / "tasks"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def holder(self, number: int) -> Owner:
        """Return the record in the lock of a device."""
        found = self.node().store.read_detailed_locks()[bus(number)].owner
        assert found is not None
        return found

    def granted(self, job: int = 12, slurmd: str = "n1") -> list[str]:
        """Return what the note of a job grants, which must be locked with its token."""
        found = self.note(job, slurmd)
        assert (found.refused, found.code) == ("", 0)
        for device in found.devices:
            owner = self.node().store.read(device.id).owner
            assert owner is not None and owner.token == found.token
        return [device.id for device in found.devices]

    def refused(self, job: int = 12, kind: str = "busy", code: int = REQUEUE_EXIT) -> str:
        """Return the sentence in the note of a refused job, which is granted nothing."""
        found = self.note(job)
        assert (found.code, found.devices, found.token) == (code, [], "")
        assert found.refused.startswith(f"gpulock: job {job}: {kind}: ")
        return found.refused

    def hold(self, number: int, **changes: object) -> Owner:
        """Let job 7, or somebody else, hold a device of a node that is in use already."""
        if not self.lock.exists():
            assert self.prolog(99, "3") == RUN
            self.epilog(99)
        one = {"devices": (bus(number),), "job_id": "7", "token": "t7", **changes}
        made = slurm_record(**one)
        place_lock(self.node().store, bus(number), made)
        return made

    def claims(self) -> list[str]:
        """Return the tokens of the claims that have a record."""
        return sorted(list_names(f"{self.records}/claims"))

    def process(
        self, pid: int, name: str, words: str = "", uid: int = UID, **about: Unpack[About]
    ) -> int:
        """Let a process run with a command line and a user."""
        about.setdefault("uids", (uid,) * 4)
        self.proc.add(pid, name, **about)
        (self.proc.root / str(pid) / "cmdline").write_bytes(words.encode() + b"\0")
        return pid

    def stepd(self, pid: int, title: str, uid: int = ROOT, **about: Unpack[About]) -> int:
        """Let a step daemon run: `stepd(700, "12.extern")`; its title is padded as Slurm's is."""
        words = f"slurmstepd: [{title}]      " if title else "/usr/sbin/slurmstepd"
        return self.process(pid, "slurmstepd", words, uid, **about)

    def hook(self, pid: int, uid: int = ROOT, **changes: str) -> int:
        """Let a Prolog or Epilog of slurmd's run."""
        self.process(pid, "slurm", uid=uid)
        return self.started_with(pid, **self.environ(**changes))

    def started_with(self, pid: int, **environ: str) -> int:
        """Let a process that runs have been started with an environment."""
        words = [f"{key}={value}" for key, value in environ.items()]
        (self.proc.root / str(pid) / "environ").write_text("\0".join(words) + "\0")
        return pid

    def left_by(self, pid: int, job: int = 12, slurmd: str = "n1", uid: int = UID) -> int:
        """Let a process be left that slurmstepd started for a job."""
        self.process(pid, "sleep", "sleep\0100", uid)
        return self.started_with(pid, SLURM_JOB_ID=str(job), SLURMD_NODENAME=slurmd, HOME="/")

    def processes(self, steps: bool = False, /, **changes: object) -> JobProcesses:
        """Return what a look finds of job 12, or of another; `steps`: its step daemons, too."""
        known = SlurmSteps(self.node().settings)
        add = known.add_members_and_steps if steps else known.add_members
        return find_job_processes(slurm_lock(**changes), ProcessScan(self.node().proc), add)

    def cgroup(self, path: str, *pids: int) -> Path:
        """Let a cgroup be, with some processes in it."""
        folder = self.sys / "fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.events").write_text("populated 0\n")
        (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
        return folder


def freezer(job: int = 12, uid: int = UID, slurmd: str = "") -> str:
    """Return where proctrack/cgroup keeps a job (docs/facts/slurm.md, cgroups of a job)."""
    return f"freezer/slurm{slurmd and '_' + slurmd}/uid_{uid}/job_{job}"


def row(job: int = 12, **changes: str) -> str:
    """Return a line of squeue's, as it pads the fields that it is asked for."""
    fields = {
        "JobID": str(job),
        "UserID": str(UID),
        "State": "RUNNING",
        "RestartCnt": "0",
        "ArrayJobID": str(job),
        "ArrayTaskID": "N/A",
        "BatchFlag": "1",
        "tres-per-job": "N/A",
        "tres-per-socket": "N/A",
        "tres-per-task": "N/A",
        "Gres": "N/A",
        **changes,
    }
    requests = [key for key in fields if key == "Gres" or key.startswith("tres-")]
    return "".join(f"{text:{400 if key in requests else 24}}" for key, text in fields.items())


def slurm_record(**changes: object) -> Owner:
    """Return a record of job 12 of this boot, as its Prolog on node n1 makes it."""
    fields: dict[str, object] = {
        "scheduler": "slurm",
        "cluster": "lab",
        "node": os.uname().nodename,
        "slurmd": "n1",
        "uid": UID,
        "queue": "main",
        "minors": ("0",),
        **dict.fromkeys(("pid", "start", "add_grp_id"), 0),
        **changes,
    }
    return record(**fields)


def slurm_lock(**changes: object) -> Lock:
    """Return the lock of such a record."""
    own = slurm_record(**changes)
    return Lock(own.devices[0], own, "")
