# SPDX-License-Identifier: Apache-2.0
"""An execution host without gpulock, on which `gpulock install sge` is tried as a site would."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpulock.simulate.node import write_simulated_node
from tests.labs.sge.config import COMPLEXES, EXECHOST_VALUES
from tests.labs.sge.lab import GridEngine, JobId
from tests.labs.sge.machines import PATH

ROOT = Path(__file__).resolve().parents[3]
NODE = "glnode1"
ON_NODE = ("-q", f"gpu.q@{NODE}", "-j", "y")
PREFIX = "/var/lib/gpulock-hooks"  # private to each machine of the lab
CONFIG = "/etc/gpulock/gpulock.conf"
GPULOCK = "from gpulock.cli import main; main()"
DOCTOR = """
from gpulock.install.doctor.doctor import DoctorOptions, run_doctor
for check in run_doctor(DoctorOptions()):
    print(check.state, check.name, check.what, check.do, sep="|")
"""


@dataclass(frozen=True)
class Node:
    """One execution host on which gpulock is to be installed."""

    sge: GridEngine

    def python(self, program: str, *args: str) -> str:
        """Run Python as root on the node, by sudo; return what it printed, errors and all."""
        user = self.sge.users["glalice"]  # root may submit nothing, where min_uid is 1000
        env = {"PYTHONPATH": str(ROOT), "SUDO_UID": str(user.uid), "SUDO_GID": str(user.uid)}
        done = self.sge.run_in(NODE, [sys.executable, "-c", program, *args], env=env, seconds=240)
        return done.stdout + done.stderr

    def install(self, *args: str) -> str:
        """Run `gpulock install sge` for gpu.q."""
        words = ("install", "sge", "--queue", "gpu.q", "--prefix", PREFIX)
        return self.python(GPULOCK, *words, *args)

    @contextmanager
    def installing(self) -> Generator[subprocess.Popen[bytes]]:
        """Give `gpulock install sge` for gpu.q while it runs, as the leader of a group."""
        words = ("install", "sge", "--queue", "gpu.q", "--prefix", PREFIX, "--yes")
        line = [*self.sge.machines[NODE].enter(), sys.executable, "-c", GPULOCK, *words]
        env = {"PATH": PATH, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(
            line,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as done:
            yield done

    def uninstall(self, *args: str) -> str:
        """Run `gpulock uninstall sge`."""
        return self.python(GPULOCK, "uninstall", "sge", *args)

    def doctor(self) -> dict[str, tuple[str, str, str]]:
        """Return (state, what, do) of the worst check of each name."""
        rows = [line.split("|") for line in self.python(DOCTOR).splitlines()]
        rank = {"ok": 0, "warning": 1, "fault": 2}
        rows.sort(key=lambda row: rank[row[0]])
        return {row[1]: (row[0], row[2], row[3]) for row in rows}

    def objects(self) -> dict[str, str]:
        """Return all of Grid Engine's configuration that an installation may touch."""
        shown = {
            option: self.sge.qconf(*option.split())
            for option in ("-sq gpu.q", "-sq cpu.q", "-sc", "-sconf", "-sconfl")
        }
        if NODE in shown["-sconfl"].split():
            shown["own"] = self.sge.qconf("-sconf", NODE)
        host = self.sge.qconf("-se", NODE).replace("\\\n", " ").splitlines()
        shown["-se"] = "\n".join(line for line in host if not line.startswith("load_values"))
        # A configuration that was loaded is shown with other blanks than one of a first start.
        return {option: re.sub(r" +(?:\\\n *)?", " ", text) for option, text in shown.items()}

    def files(self) -> dict[str, list[str]]:
        """Return what lies where an installation puts files."""
        return {
            folder: sorted(p.name for p in self.sge.path_in(NODE, folder).glob("*"))
            for folder in ("/etc/gpulock", "/etc/profile.d", PREFIX)
        }

    def run(self, *args: str, script: str) -> tuple[JobId, str]:
        """Run a job of glalice to its end; return its number and what it printed."""
        job = self.sge.submit("glalice", *ON_NODE, "-o", "install.out", *args, stdin=script)
        self.sge.wait_done(job)
        out = self.sge.users["glalice"].home / "install.out"
        text = out.read_text() if out.exists() else ""
        out.unlink(missing_ok=True)
        return job, text


def bare_node(sge: GridEngine, complexes: str = "gpu gpuj") -> Iterator[Node]:
    """Give a node without gpulock; afterwards it is without gpulock again."""
    sge.set_hooks("NONE", "NONE")
    tree = sge.lab / "drivers-install"
    made = write_simulated_node(tree, "dgx1", 8, for_scheduler=True)
    text = made.config.read_text() + f"SGE_COMPLEXES={complexes}\n"
    sge.path_in(NODE, CONFIG).write_text(text)
    for folder in ("/run/gpulock", "/var/lib/gpulock"):
        for inner in sge.path_in(NODE, folder).iterdir():
            shutil.rmtree(inner) if inner.is_dir() else inner.unlink()
    node = Node(sge)
    yield node
    sge.clear_jobs()
    node.uninstall("--force", "--reason", "the test is over")
    sge.set_hooks("NONE", "NONE")
    sge.set_conf("epilog", "none")
    for name, line in COMPLEXES.items():
        sge.set_complex(f"{name} {name} {line}")
    sge.set_exechost(NODE, EXECHOST_VALUES)
    sge.clear_queue_errors()
