# SPDX-License-Identifier: Apache-2.0
"""An execution host without gpulock, on which `gpulock install sge` is tried as a site would."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpulock.install.sge.host import REPORTED
from gpulock.install.sge.queue_hooks import GROUP
from gpulock.install.versions import FOLDER
from gpulock.simulate.node import write_simulated_node
from tests.labs.sge.config import COMPLEXES, EXECHOST_VALUES
from tests.labs.sge.lab import GridEngine, JobId, without
from tests.labs.sge.machines import PATH
from tests.support.wait import LabError, wait_until

ROOT = Path(__file__).resolve().parents[3]
NODE = "glnode1"
ON_NODE = ("-q", f"gpu.q@{NODE}", "-j", "y")
PREFIX = str(FOLDER)  # private to each machine of the lab
CONFIG = "/etc/gpulock/gpulock.conf"
INSTALL = ("install", "sge")
GPULOCK = "from gpulock.cli import main; main()"


@dataclass(frozen=True)
class Node:
    """One execution host on which gpulock is to be installed."""

    sge: GridEngine
    name: str = NODE

    def python(self, program: str, *args: str) -> str:
        """Run Python as root on the node; return what it printed, errors and all."""
        env = {"PYTHONPATH": str(ROOT)}
        done = self.sge.run_in(
            self.name, [sys.executable, "-c", program, *args], env=env, seconds=240
        )
        return done.stdout + done.stderr

    def install_cluster(self, *args: str) -> str:
        """Run `gpulock install sge --cluster` for gpu.q, as a manager does it once."""
        words = ("install", "sge", "--cluster", "--queue", "gpu.q")
        return self.python(GPULOCK, *words, *args)

    def install(self, *args: str) -> str:
        """Run `gpulock install sge`, once the cluster has its part."""
        if GROUP not in self.sge.client("qconf", "-shgrpl", check=False).stdout.split():
            self.install_cluster()
        return self.python(GPULOCK, *INSTALL, *args)

    def installing(self, *args: str) -> AbstractContextManager[subprocess.Popen[str]]:
        """Give `gpulock install sge` while it runs, as the leader of a group."""
        return self.running(GPULOCK, *INSTALL, *args)

    @contextmanager
    def running(self, program: str, *args: str) -> Generator[subprocess.Popen[str]]:
        """Give Python while it runs as root on the node, as the leader of a group."""
        line = [*self.sge.machines[self.name].enter(), sys.executable, "-c", program, *args]
        with subprocess.Popen(
            line,
            env={"PATH": PATH, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as done:
            yield done

    def install_anew(self, *args: str) -> str:
        """Install where the host has no configuration of its own: execd is restarted between."""
        said = self.install(*args)
        assert "NOT in force: execd of glnode1 takes its first configuration" in unwrapped(said)
        assert f"{PREFIX}/current" not in self.sge.qconf("-sq", f"gpu.q@{self.name}")
        self.restart_execd()
        return self.install(*args)

    def restart_execd(self) -> None:
        """Have execd read its configuration, as a site does it."""
        self.sge.stop_execd(self.name)
        self.sge.start_execd(self.name)

    def obey(self, said: str) -> None:
        """Run what an uninstallation shows, as an administrator who copies it."""
        for line in said.splitlines():
            call = line.removeprefix("note: stays: ")
            if call.startswith("qconf -") and "-mconf" not in line:
                self.sge.qconf(*shlex.split(call)[1:])

    def forget_complexes(self) -> None:
        """Take out the complexes of the load sensor, once no host has values of them."""

        def are_gone() -> bool:
            left = without(self.sge.qconf("-sc"), REPORTED)
            try:
                self.sge.load("-Mc", "complexes", left)
            except LabError as fault:
                assert "still referenced" in str(fault)
                return False
            return True

        wait_until(are_gone, why="the complexes to be nobody's")

    def uninstall(self, *args: str) -> str:
        """Run `gpulock uninstall sge`."""
        return self.python(GPULOCK, "uninstall", "sge", *args)

    def uninstall_cluster(self) -> str:
        """Run `gpulock uninstall sge --cluster`, as the manager does it last."""
        return self.uninstall("--cluster")

    def objects(self) -> dict[str, str]:
        """Return all of Grid Engine's configuration that an installation may touch."""
        shown = {
            option: self.sge.qconf(*option.split())
            for option in (
                "-sq gpu.q",
                "-sq cpu.q",
                f"-sq gpu.q@{NODE}",
                "-sc",
                "-sconf",
                "-sconfl",
            )
        }
        shown["-shgrpl"] = self.sge.client("qconf", "-shgrpl", check=False).stdout
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


def lay_out_node(sge: GridEngine, name: str = NODE, complexes: str = "gpu gpuj") -> Node:
    """Give a node settings and a simulated driver, and nothing of an earlier installation."""
    drivers = sge.lab / f"drivers-install.{name}"
    shutil.rmtree(drivers, ignore_errors=True)  # a test before had it
    made = write_simulated_node(drivers, "dgx1", 8, for_scheduler=True)
    text = made.config.read_text() + f"SGE_COMPLEXES={complexes}\n"
    sge.path_in(name, CONFIG).write_text(text)
    for folder in ("/run/gpulock", "/run/gpulock.claims", "/var/lib/gpulock"):
        for inner in sge.path_in(name, folder).iterdir():
            shutil.rmtree(inner) if inner.is_dir() else inner.unlink()
    return Node(sge, name)


def bare_node(sge: GridEngine, complexes: str = "gpu gpuj") -> Iterator[Node]:
    """Give a node without gpulock; afterwards it is without gpulock again.

    Other files of tests in the same cell leave `shepherd_cmd none` of their own node behind.
    """
    sge.set_hooks("NONE", "NONE")
    if NODE in sge.qconf("-sconfl").split():
        sge.forget_conf(NODE, "shepherd_cmd", "load_sensor")
    node = lay_out_node(sge, NODE, complexes)
    yield node
    sge.clear_jobs()
    sge.set_hooks("NONE", "NONE")
    clear_node(node)
    node.uninstall_cluster()
    sge.set_conf("epilog", "none")
    node.forget_complexes()
    for name, line in COMPLEXES.items():
        sge.set_complex(f"{name} {name} {line}")
    sge.set_exechost(NODE, EXECHOST_VALUES)
    sge.clear_queue_errors()


def unwrapped(said: str) -> str:
    """Return what was said without the ends of its lines."""
    return " ".join(said.split())


def clear_node(node: Node) -> None:
    """Take gpulock out of a node and its host's lines, whatever state they are in."""
    for hook in ("prolog", "epilog"):
        node.sge.qconf("-purge", "queue", hook, f"gpu.q@{node.name}")
    node.uninstall()
