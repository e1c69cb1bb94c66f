# SPDX-License-Identifier: Apache-2.0
"""What the container tests share: a node whose jobs start containers, and those containers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click

from gpulock.install.container_hooks import (
    PODMAN_HOOKS,
)
from gpulock.install.files import find_share_folder
from gpulock.job.environment import BIND_LISTS, grant_variable_names, loaded_driver_version
from gpulock.node.settings_file import read_settings
from tests.labs.common.processes import remove_cgroups
from tests.labs.containers.install import SID, make_image
from tests.labs.containers.stage import CAPS_MAJOR, MAJOR, Stage
from tests.support.cli_site import Site
from tests.support.wait import LabError

ROOT: Final = Path(__file__).resolve().parents[3]
CGROUPS: Final = Path("/sys/fs/cgroup")
CDI_DIR: Final = "/run/cdi"
CONTROL: Final = ("nvidiactl", "nvidia-uvm")
# This machine may be one on which podman's own wishes (a million files) cannot be had.
_LIMITS: Final = ("--ulimit", "nofile=20000:20000", "--ulimit", "nproc=1000:1000")
_PODMAN: Final = (
    "podman --root /var/lib/lab --runroot /run/lab --storage-driver vfs "
    "--cgroup-manager cgroupfs --events-backend none --runtime runc"
)
# "$1" the settings, "$2" the archive of the image; what follows are arguments of podman run.
_IN_PODMAN: Final = f"""
set -eu
conf=$1 image=$2; shift 2
"$PYTHON" -c 'from gpulock.cli import main; main()' --config "$conf" cdi --write >&2
{_PODMAN} import -q "$image" lab:1 >/dev/null
exec {_PODMAN} run --rm --network none "$@"
"""
# "$1" the image, which podman wants to be the user's own; what follows is for podman run.
_AS_ALICE: Final = """
set -eu
export XDG_RUNTIME_DIR=~/run
mkdir ~/run
cp -r "$1" ~/image; shift
exec podman --root ~/podman --runroot ~/podman-run --storage-driver vfs --cgroup-manager cgroupfs \\
    --events-backend none --runtime runc run --rm --network none --ulimit host "$@"
"""


class Containers:
    """A node of a preset with driver sets and CDI, an image, and the places to start it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parent = f"gpulock-containers-{os.urandom(4).hex()}"
        self.image = make_image(folder / "image")
        folder.chmod(0o755)  # alice's containers are started from here

    def node(self, preset: str, **keys: str) -> Node:
        """Return a node of its own."""
        return Node(self, self.folder / f"{preset}-{os.urandom(3).hex()}", preset, keys)

    def podman_hooks(self) -> dict[str, str]:
        """Return a folder with gpulock's hook, and where podman looks for it."""
        hooks = self.folder / "hooks"
        if not hooks.exists():
            shutil.copytree(find_share_folder() / "prolog/podman", hooks)
        return {str(hooks): str(PODMAN_HOOKS)}

    def down(self) -> None:
        """Remove the cgroups that podman leaves; all else went with its namespaces."""
        remove_cgroups(self.groups)

    def groups(self) -> list[Path]:
        """Return the cgroups that podman has made, whatever others make and remove meanwhile."""
        walks = os.walk(CGROUPS)
        return [Path(top, n) for top, names, _ in walks for n in names if n.startswith(self.parent)]


class Node:
    """One node: what a job on it is given, and its containers."""

    def __init__(self, lab: Containers, folder: Path, preset: str, keys: Mapping[str, str]) -> None:
        folder.mkdir()
        self.lab = lab
        self.site = Site(folder, preset)
        self.settings = read_settings(self.site.config)
        self.version = loaded_driver_version(self.settings.driver_root)
        self.sets = folder / "sets"
        self.add_set(self.version)
        own = {"DRIVER_DIR": str(self.sets), "CDI_DIR": CDI_DIR, **keys}
        config = Path(self.site.config)
        lines = [f"{key}={value}\n" for key, value in own.items()]
        config.write_text(config.read_text() + "".join(lines))
        # The same node with its devices in /dev, which a stage has: no simulated one there.
        self.staged = folder / "staged.conf"
        kept = [
            line
            for line in config.read_text().splitlines(keepends=True)
            if not line.startswith(("SIMULATION=", "DEV_ROOT="))
        ]
        self.staged.write_text("".join(kept))

    def add_set(self, version: str) -> None:
        """Put a driver's files where this node's containers look for them."""
        for part, name in (("bin", "nvidia-smi"), ("lib", "libcuda.so.1")):
            (self.sets / version / part).mkdir(parents=True)
            (self.sets / version / part / name).write_text(f"{version}\n")

    @property
    def nodes(self) -> dict[str, tuple[int, int]]:
        """The device nodes of this node, by name in /dev."""
        dev = Path(self.settings.dev_root)
        minors = [gpu.minor for gpu in self.site.files.machine.gpus]
        found = {f"nvidia{minor}": (MAJOR, minor) for minor in minors}
        found |= {name: (MAJOR, 255 - number) for number, name in enumerate(CONTROL)}
        for path in (dev / "nvidia-caps").glob("nvidia-cap*"):
            minor = int(path.name.removeprefix("nvidia-cap"))
            found[f"nvidia-caps/{path.name}"] = (CAPS_MAJOR, minor)
        return found

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
        stage = Stage(SID, self.lab.folder / "mnt", (self.lab.folder,), self.nodes)
        start = ["apptainer", "--quiet", "exec", *flags, str(self.lab.image), "sh", "-c", script]
        return stage.run(start, env)

    def rootless_podman(
        self, script: str, env: Mapping[str, str], *flags: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell script in podman as alice, on a node that has gpulock's hook."""
        stage = Stage(Path("/"), self.lab.folder / "mnt", (self.lab.folder,), self.nodes)
        start = ["sh", "-c", _AS_ALICE, "podman", str(self.lab.image), *flags]
        run = [*start, "--rootfs", "/home/alice/image", "sh", "-c", script]
        return stage.run(run, env, mounts=self.lab.podman_hooks())

    def podman(
        self, script: str, env: Mapping[str, str], *flags: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell script in podman as root, with gpulock's CDI spec, and its hook."""
        archive = self.lab.folder / "image.tar"
        if not archive.exists():
            subprocess.run(["tar", "-C", str(self.lab.image), "-cf", str(archive), "."], check=True)
        modules = Path(click.__file__).parents[1]  # a mount of its own in another release's root
        shared = (self.lab.folder, ROOT, modules)
        stage = Stage(Path("/"), self.lab.folder / "mnt", shared, self.nodes)
        cgroup = f"--cgroup-parent=/{self.lab.parent}"
        start = ["sh", "-c", _IN_PODMAN, "podman", str(self.staged), str(archive)]
        run = [*_LIMITS, cgroup, *flags, "lab:1", "sh", "-c", script]
        python = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
        return stage.run([*start, *run], {**env, **python}, 0, self.lab.podman_hooks())
