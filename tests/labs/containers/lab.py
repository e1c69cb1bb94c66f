# SPDX-License-Identifier: Apache-2.0
"""A node of a preset whose user alice runs jobs in Apptainer and podman."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gpulock.install.doctor.containers import PODMAN_HOOK
from gpulock.install.files import find_share_folder
from gpulock.install.versions import CURRENT, FOLDER
from gpulock.job.environment import BIND_LISTS, grant_variable_names
from gpulock.node.devices import MAJOR
from gpulock.node.settings_file import read_settings
from tests.labs.common.device_nodes import CONTROL
from tests.labs.common.processes import remove_cgroups
from tests.labs.containers.job import PODMAN, PREPARE, Boxes, fitted
from tests.labs.sge.machines import Machine, User, end_processes
from tests.support.cli_site import PROGRAM, ROOT, Site
from tests.support.wait import LabError

CAPS_MAJOR: Final = 240  # nvidia-caps has whatever the kernel gave it
CGROUPS: Final = Path("/sys/fs/cgroup")


class Node:
    """A machine with a simulated driver, what a job on it is given, and its containers."""

    def __init__(self, folder: Path, preset: str) -> None:
        self.folder = folder
        self.site = Site(folder, preset)
        self.alice = User("alice", 3001, folder / "alice")
        self.root = User("root", 0, folder / "root")
        for user in (self.alice, self.root):
            user.home.mkdir()
            os.chown(user.home, user.uid, user.uid)
        self.machine = Machine("box", 1, folder)
        self.boxes = Boxes(self.machine, read_settings(self.site.config))
        own = {name: self.boxes.keys[name] for name in ("DRIVER_DIR", "CDI_DIR")}
        self.site.set("".join(f"{k}={v}\n" for k, v in (own | {"VISIBLE_DEVICES": "uuid"}).items()))
        self.settings, self.version = read_settings(self.site.config), self.boxes.version
        self._parent = f"gpulock-containers-{os.urandom(4).hex()}"

    @contextmanager
    def up(self) -> Generator[None]:
        """Boot the machine, with gpulock's CDI spec and its hook; leave nothing of it."""
        try:
            self.machine.boot([self.alice], [], "")
            layer = self.folder / "layer"
            hooks = layer / (FOLDER / CURRENT / "podman").relative_to("/")
            shutil.copytree(find_share_folder() / "prolog/podman", hooks)
            link = layer / PODMAN_HOOK
            link.parent.mkdir(parents=True)
            link.symlink_to(FOLDER / CURRENT / "podman" / link.name)
            with fitted(self.machine, self._make_nodes(), str(layer / "usr")):
                staged = self.folder / "staged.conf"  # its devices are in /dev, and not simulated
                text = re.sub(
                    r"(?m)^(SIMULATION|DEV_ROOT)=.*\n", "", Path(self.site.config).read_text()
                )
                staged.write_text(f"{text}DEV_ROOT=/dev\n")
                done = self._run([*PROGRAM, "--config", str(staged), "reap"], self.root)
                assert done.returncode == 0, done.stderr
                yield
        finally:
            end_processes(self.folder)
            remove_cgroups(self._groups)

    def _make_nodes(self) -> Path:
        dev = self.folder / "dev"
        for path in Path(self.settings.dev_root).rglob("nvidia*"):
            if path.is_file():
                node = dev / path.relative_to(self.settings.dev_root)
                node.parent.mkdir(parents=True, exist_ok=True)
                ends = re.search(r"(\d+)$", node.name)
                major = CAPS_MAJOR if node.parent != dev else MAJOR
                os.mknod(node, 0o020666, os.makedev(major, int(ends[1]) if ends else CONTROL))
                node.chmod(0o666)
        return dev

    def _groups(self) -> list[Path]:
        """Return the cgroups that podman has made, whatever others make and remove meanwhile."""
        walks = os.walk(CGROUPS)
        return [Path(top, n) for top, names, _ in walks for n in names if n == self._parent]

    def job(self, count: int, **users: str) -> dict[str, str]:
        """Return what a job with so many GPUs finds of ours in its environment."""
        command = ("run", "-n", str(count), "--", "/usr/bin/env", "-0")
        done = self.site.run(*command, env={"PATH": os.environ["PATH"], **users})
        if done.returncode != 0:
            raise LabError(done.stderr)
        pairs = [pair.partition("=") for pair in done.stdout.split("\0") if pair]
        ours = {*grant_variable_names(), *BIND_LISTS, *users}
        return {name: value for name, _, value in pairs if name in ours}

    def apptainer(
        self, script: str, env: Mapping[str, str], *flags: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell script in Apptainer as alice."""
        start = ["apptainer", "--quiet", "exec", *flags, str(self.boxes.image)]
        return self._run([*start, "sh", "-c", script], self.alice, env)

    def podman(
        self, script: str, env: Mapping[str, str], *flags: str, as_root: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell script in podman, as alice if not told otherwise."""
        user = self.root if as_root else self.alice
        start = f'IMAGE={self.boxes.image}\n{PREPARE}exec {PODMAN} "$@"'
        parent = [f"--cgroup-parent=/{self._parent}"] if as_root else []
        words = [*parent, *flags, "--rootfs", f"{user.home}/image", "sh", "-c", script]
        return self._run(["sh", "-c", start, "podman", *words], user, env)

    def _run(
        self, command: list[str], user: User, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        home = {"HOME": str(user.home), "USER": user.name, "LC_ALL": "C.UTF-8"}
        python = {"PYTHONPATH": str(ROOT)} if command[0] == sys.executable else {}
        return self.machine.run(
            command, env={**home, **python, **(env or {})}, uid=user.uid, seconds=180
        )


@contextmanager
def booted_node(preset: str) -> Generator[Node]:
    """Give such a node; not in pytest's own folders, which are closed to alice."""
    with tempfile.TemporaryDirectory(prefix="gpulock-containers-") as folder:
        os.chmod(folder, 0o755)
        node = Node(Path(folder), preset)
        with node.up():
            yield node
