# SPDX-License-Identifier: Apache-2.0
"""What doctor looks at for containers: the driver set, Apptainer's rules, the CDI spec, enroot.

What each rule does to a job's container was tried with Apptainer 1.4.5 and podman 4.3.1; of
enroot and pyxis it is read from their sources (docs/containers.md).
"""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Final

from gpulock.daemon.reconcile import cdi
from gpulock.errors import Refusal
from gpulock.install.container_hooks import (
    ENROOT_HOOK,
    ENROOT_HOOKS,
    PODMAN_HOOK,
    PODMAN_HOOKS,
)
from gpulock.install.docker import (
    CDI_FOLDERS,
    DAEMON_JSON,
    FOLDERS,
    PID_FILE,
    dockerd_release,
    find_dockerd,
    is_among,
    parse_daemon_json,
    takes_cdi_names,
)
from gpulock.install.doctor.check import DRIVER, INSTALLED, Check, Finding, fault, warning
from gpulock.install.hooks import InstallError
from gpulock.job.environment import CDI_KIND, driver_binds, loaded_driver_version
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.store import atomic

PLACES: Final = ("etc", "usr/local/etc", "opt/apptainer/etc", "opt/singularity/etc")
PROGRAMS: Final = ("apptainer", "singularity")
ENROOT: Final = ("usr/bin/enroot", "usr/local/bin/enroot")
PODMAN: Final = ("usr/bin/podman", "usr/local/bin/podman")
# What has podman give a container more than its job's GPUs: NVIDIA's hook, and its CDI names.
NVIDIA_SERVES: Final = (
    "usr/share/containers/oci/hooks.d/oci-nvidia-hook.json",
    "etc/cdi/nvidia.yaml",
    "var/run/cdi/nvidia.yaml",
)
# Daemons of root that start containers, by the sockets on which they take orders.
DAEMONS: Final = {"run/docker.sock": "Docker", "run/podman/podman.sock": "podman's service"}
_READ: Final = stat.S_IROTH | stat.S_IXOTH


def container_checks(settings: Settings, root: Path = Path("/")) -> list[Check]:
    """Return what hinders containers; of a simulated node nothing outside itself is looked at."""
    looks: dict[str, Callable[[], Iterable[Finding]]] = {
        "driver set": lambda: check_driver_dir(settings),
        "CDI": lambda: check_cdi_spec(settings),
    }
    if not settings.simulation:
        for program in PROGRAMS:
            paths = [root / place / program / f"{program}.conf" for place in PLACES]
            for path in (path for path in paths if path.is_file()):
                looks[path.name] = partial(check_container_conf, settings, path)
        looks["enroot"] = lambda: check_enroot(settings, root)
        looks["podman"] = lambda: check_podman(root)
        looks["Docker"] = lambda: check_docker(settings, root)
        looks["container daemons"] = lambda: check_container_daemons(root)
    return [Check(name, look, (INSTALLED, DRIVER)) for name, look in looks.items()]


def check_driver_dir(settings: Settings) -> Iterator[Finding]:
    """Look at this node's driver in DRIVER_DIR, as a user's container will see it."""
    if not settings.driver_dir:
        return
    try:
        driver_binds(settings)
        version = loaded_driver_version(settings.driver_root)
    except Refusal as refusal:
        yield fault(f"{refusal.why}: no job with GPUs starts", refusal.do)
        return
    folder = Path(settings.driver_dir, version)
    yield from check_folders_readable(folder)
    yield from check_driver_files(folder)
    yield from check_driver_contents(folder, version)


def check_folders_readable(folder: Path) -> Iterator[Finding]:
    """Yield the folders on the way to the files that a user cannot enter."""
    for path in (*reversed(folder.parents), folder, folder / "bin", folder / "lib"):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & stat.S_IXOTH == 0 or (folder in path.parents and mode & _READ != _READ):
            what = f"users cannot read {path} (mode {mode:04o})"
            yield fault(what, f"chmod o+rx {quote(str(path))}")


def check_driver_files(folder: Path) -> Iterator[Finding]:
    """Yield the first file that a user cannot read, and the first place that others may change."""
    name, folders = quote(str(folder)), (folder / "bin", folder / "lib")
    files = [path for part in folders for path in sorted(part.iterdir()) if path.is_file()]
    hidden = [path for path in files if not path.stat().st_mode & stat.S_IROTH]
    if hidden:
        mode = stat.S_IMODE(hidden[0].stat().st_mode)
        rest = f", nor {len(hidden) - 1} more there" if hidden[1:] else ""
        what = f"users cannot read {hidden[0]} (mode {mode:04o}){rest}"
        yield fault(what, f"chmod -R o+rX {name}")
    for path in [one for one in (folder.parent, folder, *folders, *files) if other_writers(one)][
        :1
    ]:
        name = name if path != folder.parent else quote(str(path))
        what = f"{other_writers(path)} may change {path}, which all jobs load"
        yield fault(what, f"chown -R root {name}; chmod -R go-w {name}")


def other_writers(path: Path) -> str:
    """Return who else than root may change a file or a folder, or nothing; raise OSError."""
    info = path.stat()
    if info.st_mode & stat.S_IWOTH:
        return "anybody"
    if info.st_uid not in (0, os.geteuid()):
        return f"uid {info.st_uid}"
    return f"group {info.st_gid}" if info.st_mode & stat.S_IWGRP and info.st_gid != 0 else ""


def check_driver_contents(folder: Path, version: str) -> Iterator[Finding]:
    """Yield what is missing of a driver, or is another's."""
    library = folder / "lib/libcuda.so.1"
    of = library.resolve().name.removeprefix("libcuda.so.")
    if not library.is_file():
        do = f"copy the libraries of driver {version} there"
        yield fault(f"{library} is missing: containers have no CUDA", do)
    elif of not in ("1", version):
        yield fault(f"{library} is of driver {of}", f"copy that of {version} there")
    if not os.access(folder / "bin/nvidia-smi", os.X_OK):
        yield warning(f"{folder}/bin/nvidia-smi is missing", f"copy that of {version} there")


def check_container_conf(settings: Settings, path: Path) -> Iterator[Finding]:
    """Look at what an apptainer.conf or singularity.conf forbids of what a job is given."""
    rules = parse_container_conf(path.read_text(errors="replace"))
    if settings.driver_dir and rules.get("user bind control") == "no":
        what = "`user bind control = no`: the driver's files are not bound onto /nvbin and /nvlib"
        yield fault(what, f"set `user bind control = yes` in {path}, or unset DRIVER_DIR")
    if settings.driver_dir and rules.get("enable overlay") == rules.get("enable underlay") == "no":
        what = "neither overlay nor underlay: an image without /nvbin and /nvlib does not start"
        yield fault(what, f"set `enable underlay = yes` in {path}")
    if rules.get("mount dev", "yes") != "yes" and rules.get("always use nv") != "yes":
        what = f"`mount dev = {rules['mount dev']}`: without --nv a container has no GPU"
        yield warning(what, f"set `mount dev = yes` or `always use nv = yes` in {path}")
    if rules.get("use nvidia-container-cli") == "yes":
        what = "`use nvidia-container-cli = yes`: --nv shows all GPUs, whatever was granted"
        yield warning(what, f"set it to `no` in {path}, or ISOLATION")


def parse_container_conf(text: str) -> Mapping[str, str]:
    """Return the directives of such a file; of one that is given twice the last."""
    lines = (line.partition("#")[0].partition("=") for line in text.splitlines())
    return {name.strip(): value.strip() for name, equals, value in lines if equals}


def check_cdi_spec(settings: Settings) -> Iterator[Finding]:
    """Look whether the spec in CDI_DIR is this node's, and is found by who should."""
    if not settings.cdi_dir:
        return
    try:
        path = cdi.cdi_spec_path(settings)
        made = cdi.build_cdi_spec(settings, Node(settings).devices())
    except Refusal as refusal:
        yield fault(f"no spec: {refusal.why}", refusal.do)
        return
    if not is_among(settings.cdi_dir, CDI_FOLDERS):
        what = f"podman does not look in {settings.cdi_dir}, nor does Docker by itself"
        yield warning(what, "set CDI_DIR=/var/run/cdi, or tell them of that folder")
    for other in other_cdi_specs(Path(path)):
        what = f"{other} names {CDI_KIND} as well: neither is taken"
        yield fault(what, f"remove {other}")
    try:
        now = atomic.read_text(path, cdi.LIMIT)
    except FileNotFoundError:
        now = ""
    if now != cdi.format_cdi_spec(made):
        what = f"{path} {'is not as the node is' if now else 'is missing'}"
        yield warning(what, "run gpulock cdi --write, and gpulockd to keep it")


def other_cdi_specs(path: Path) -> Iterator[Path]:
    """Yield other specs of our kind beside ours: CDI takes no name that two files have."""
    for other in sorted(path.parent.glob("*.json")) if path.parent.is_dir() else ():
        if other != path and f'"{CDI_KIND}"' in other.read_text(errors="replace"):
            yield other


def check_enroot(settings: Settings, root: Path) -> Iterator[Finding]:
    """Look whether a mask means the same inside an enroot container."""
    if not any((root / path).exists() for path in ENROOT):
        return
    if settings.visible_devices == "index":
        what = "a container has its own GPUs alone, counted from 0: a mask of indexes misses them"
        yield warning(what, "set VISIBLE_DEVICES=uuid")
    folder = root / str(ENROOT_HOOKS).removeprefix("/")
    if folder.is_dir() and not (folder / ENROOT_HOOK).is_file():
        what = "enroot start gives a container no mask of the job, and all GPUs"
        yield warning(what, "gpulock install slurm --enroot, or sge --enroot")


def check_podman(root: Path) -> Iterator[Finding]:
    """Look whether a container of podman's has its job's mask; what is installed, items compare."""
    hook = root / str(PODMAN_HOOKS / PODMAN_HOOK).removeprefix("/")
    if hook.is_file() or not any((root / path).exists() for path in PODMAN):
        return
    for name in [one for one in NVIDIA_SERVES if (root / one).exists()][:1]:
        what = f"/{name} gives a container in a job every GPU, and it has no mask"
        yield warning(what, "gpulock install slurm --podman, or sge --podman")


def check_docker(settings: Settings, root: Path) -> Iterator[Finding]:
    """Look whether Docker takes the names in GPULOCK_CDI, and gives no GPU unasked."""
    path, dockerd = root / str(DAEMON_JSON).removeprefix("/"), find_dockerd(root)
    text = path.read_text(errors="replace") if path.is_file() else None
    try:
        by_default = parse_daemon_json(text).get("default-runtime")
        if dockerd and settings.cdi_dir:
            release = dockerd_release(dockerd)
            if not takes_cdi_names(text, release, settings.cdi_dir):
                what = f"Docker takes no names of {settings.cdi_dir}: $GPULOCK_CDI starts nothing"
                do = f'in {path} set "features": {{"cdi": true}}, and that folder in "{FOLDERS}"'
                yield warning(what, f"{do} (Docker 25.0 or later)")
            elif is_older(root / PID_FILE, path):
                what = f"{path} was changed since Docker started: $GPULOCK_CDI may start nothing"
                yield warning(what, "systemctl restart docker, when no container runs")
    except InstallError as wrong:
        yield warning(str(wrong), "Docker reads it at its next start")
        return
    if by_default == "nvidia":
        what = "Docker gives every GPU to a container whose image says all, unasked"
        yield warning(what, f"take default-runtime out of {path}: --gpus asks for it")


def is_older(path: Path, other: Path) -> bool:
    """Return whether a file was written before another one; not where one is missing."""
    try:
        return path.stat().st_mtime < other.stat().st_mtime
    except FileNotFoundError:
        return False


def check_container_daemons(root: Path) -> Iterator[Finding]:
    """Look who may have root's daemon start a container: nothing of a job reaches that."""
    for name, daemon in DAEMONS.items():
        path = root / name
        if not path.exists():
            continue
        users, do = find_socket_users(path)
        if users:
            what = f"{users} may start containers of {daemon}: no mask, ISOLATION or end of a job"
            how = "Apptainer, enroot and rootless podman start them within the job"
            yield warning(f"{what} reaches those", f"{do}: {how}")


def find_socket_users(path: Path) -> tuple[str, str]:
    """Return who else than root may connect to a socket, and how to end that; raise OSError."""
    mode, folder = path.stat().st_mode, path.parent.stat().st_mode
    if mode & stat.S_IWOTH and folder & stat.S_IXOTH:
        return "any user", f"chmod 660 {path}"
    if not (mode & stat.S_IWGRP and folder & (stat.S_IXOTH | stat.S_IXGRP)):
        return "", ""
    try:
        group = grp.getgrgid(path.stat().st_gid)
    except KeyError:
        return "", ""
    members = ", ".join(name for name in group.gr_mem if name != "root")
    return members, f"take them out of group {group.gr_name}"
