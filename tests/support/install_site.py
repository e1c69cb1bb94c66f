# SPDX-License-Identifier: Apache-2.0
"""A node for the installer's tests: simulated driver, recorded Grid Engine, all in one folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpulock.install import versions
from gpulock.install.daemons import SchedulerDaemon
from gpulock.install.doctor import doctor
from gpulock.install.doctor.check import FAULT, OK, WARNING, Finding, Report
from gpulock.install.items import Item, Outcome, Wanted, run_items
from gpulock.install.sge import login, qconf, site
from gpulock.install.sge.cluster import ClusterInstaller
from gpulock.install.sge.install import SgeInstaller
from gpulock.install.sge.queue_hooks import hook_line
from gpulock.node.settings_file import read_settings
from gpulock.simulate.node import write_simulated_node
from tests.support.in_process import compile_no_library, play_fakes_in_process, run_or_play
from tests.support.scripts import copy_program

RECORDED = Path(__file__).parent / "data/qconf-8.1.9"
FAKE = Path(__file__).parent / "fake_qconf.py"
Echo = Callable[[str], None]


def ignore(*_: object) -> None:
    """Take a line that nobody reads, or hooks that nobody tries."""


def tree(folder: Path) -> dict[str, str]:
    """Return the text of every file below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(p.relative_to(folder)): p.read_text(errors="replace") for p in files}


def qconf_values(text: str) -> dict[str, str]:
    """Return an object of qconf without the blanks between its columns."""
    lines = [one.split(None, 1) for one in text.replace("\\\n", " ").splitlines() if one[:1] != "#"]
    return {line[0]: " ".join(" ".join(line[1:]).split()) for line in lines if line}


def harm(root: Path, command: str) -> None:
    """Run a command of the shell in the folder of an installed node."""
    subprocess.run(["/bin/sh", "-ec", command], cwd=root, check=True)


def keep_copy(root: Path) -> None:
    """Keep what an installed node is, for `put_back`."""
    shutil.copytree(root, f"{root}.as-installed", symlinks=True)


def put_back(root: Path) -> None:
    """Make an installed node what it was."""
    shutil.rmtree(root)
    shutil.copytree(f"{root}.as-installed", root, symlinks=True)


def be_real(config: Path) -> None:
    """Let a simulated node have a scheduler, with paths of its own: for doctor it is real."""
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if "SIMUL" not in line))
    Path(read_settings(str(config)).state_dir).mkdir(exist_ok=True)


def worst_of(report: Report) -> dict[str, Finding]:
    """Return the worst finding of each name, and OK for each check that found nothing."""
    rank = {OK: 0, WARNING: 1, FAULT: 2}
    well = {name: Finding(name, OK, "") for name in report.passed}
    return well | {one.name: one for one in sorted(report.findings, key=lambda c: rank[c.state])}


@dataclass(frozen=True)
class Site:
    """Where everything is."""

    root: Path
    config: Path

    @property
    def state(self) -> Path:
        """What the recorded Grid Engine knows."""
        return self.root / "sge/state"

    @property
    def hooks(self) -> Path:
        """The folder of the hooks."""
        return self.root / "node/state/hooks"

    def show(self, name: str) -> str:
        """Return a recorded object as it is now."""
        return (self.state / name).read_text()

    def parts(self, **changes: Any) -> list[Item]:
        """Return the items of an installation on this node."""
        return SgeInstaller(self.config, ignore, **changes).parts()

    def cluster(self, *queues: str) -> ClusterInstaller:
        """Return what a manager asks for, for gpu.q where no queue is given."""
        return ClusterInstaller(self.config, queues or ("gpu.q",))

    def install_cluster(self) -> Outcome:
        """Have the cluster's part in place."""
        return self.run(self.cluster().parts(), Wanted.PRESENT)

    def install(self, echo: Echo = ignore, **changes: Any) -> Outcome:
        """Install on this node."""
        parts = SgeInstaller(self.config, echo, **changes).parts()
        return self.run(parts, Wanted.PRESENT, echo)

    def install_all(self) -> Outcome:
        """Install the cluster's part, then this node's."""
        self.install_cluster()
        return self.install()

    def uninstall(self, echo: Echo = ignore) -> Outcome:
        """Uninstall from this node."""
        return self.run(SgeInstaller(self.config, echo).removal(), Wanted.ABSENT, echo)

    def notes_of_removal(self) -> list[str]:
        """Return what an uninstallation tells the administrator."""
        installer = SgeInstaller(self.config, ignore)
        installer.removal()
        return installer.notes

    def run(self, items: list[Item], wanted: Wanted, echo: Echo = ignore) -> Outcome:
        """Run over all items."""
        state_dir = Path(read_settings(str(self.config)).state_dir)
        return run_items(items, wanted, state_dir, echo)

    def in_force(self, hook: str) -> str:
        """Return the hook of gpu.q that qmaster has worked out for this host."""
        line = run_or_play([str(self.root / "sge/qconf"), "-sq", "gpu.q@node1"], 20, os.environ)
        return next(
            one.split(" ", 1)[1] for one in line.stdout.splitlines() if one.startswith(hook)
        )

    def hook(self, name: str) -> str:
        """Return the command line of our hook alone."""
        return hook_line(self.hooks / "current", name)

    def set_attribute(self, hook: str, value: str) -> None:
        """Set a hook for this host, as an administrator does."""
        words = [str(self.root / "sge/qconf"), "-rattr", "queue", hook, value, "gpu.q@node1"]
        assert run_or_play(words, 20, os.environ).returncode == 0

    def restart_execd(self) -> None:
        """Have execd read the configuration that its host has now."""
        (self.state / "unknown").unlink(missing_ok=True)

    def harm(self, command: str) -> None:
        """Run a command of the shell in the folder of all that there is."""
        harm(self.root, command)

    def edit(self, name: str, old: str, new: str) -> None:
        """Change a recorded object as an administrator would."""
        text = self.show(name)
        assert old in text
        (self.state / name).write_text(text.replace(old, new))


@contextmanager
def deaf_execd(site: Site, patch: pytest.MonkeyPatch) -> Generator[None]:
    """Have execd take no configuration meanwhile, for which nobody waits long."""
    line = next(one for one in site.show("sconf").splitlines() if one.startswith("load_report"))
    site.edit("sconf", line, "load_report_time 00:00:00")
    (site.state / "deaf").touch()
    with patch.context() as slack:
        slack.setattr("gpulock.install.sge.host._SLACK_SECONDS", 0.0)
        yield
    (site.state / "deaf").unlink()


def make_site(folder: Path, patch: pytest.MonkeyPatch) -> Site:
    """Lay the node out and let the installer find an execd there."""
    folder.mkdir(exist_ok=True)
    node = write_simulated_node(folder / "node", "dgx1")
    programs = folder / "sge"
    shutil.copytree(RECORDED, programs / "state")
    (programs / "state/states").write_text("")
    for name in ("qconf", "qselect", "qstat", "sge_shepherd"):
        copy_program(FAKE, programs / name)
    common = folder / "root/default/common"
    common.mkdir(parents=True)
    (common / "bootstrap").write_text("admin_user              sgeadmin\n")
    spool = folder / "spool/node1"
    spool.mkdir(parents=True)
    env = {"SGE_ROOT": str(folder / "root")}
    program = programs / "sge_execd"
    execd = SchedulerDaemon(os.getpid(), 1, os.geteuid(), program, spool, (), env)
    for module in (site, doctor):
        patch.setattr(module, "find_execds", lambda: [execd])
    play_fakes_in_process(patch, qconf)
    compile_no_library(patch)
    patch.setitem(versions._TRIALS, "sge", ignore)  # ten processes; has its own test
    patch.setattr("gpulock.install.sge.host._PAUSE", 0.0)
    patch.setattr(login, "PROFILE", folder / "profile.d/gpulock.sh")
    config = folder / "etc/gpulock.conf"
    config.parent.mkdir()
    text = node.config.read_text() + f"SGE_BINARIES={programs}\n"
    config.write_text(text)
    return Site(folder, config)
