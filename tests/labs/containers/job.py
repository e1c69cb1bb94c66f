# SPDX-License-Identifier: Apache-2.0
"""Container programs where a lab's scheduler runs its jobs, called as a user of a node calls them.

A node keeps its own root, so that it is the scheduler's job that starts the container. Only for a
while it has sid's Apptainer, with the C library that this one needs, and NVIDIA's device nodes in
/dev: who binds one from elsewhere gets a file without its device.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from gpulock.job.environment import loaded_driver_version
from gpulock.node.settings import Settings
from tests.labs.common.device_nodes import opened
from tests.labs.sge.machines import Machine
from tests.support.wait import LabError

SID: Final = Path("/srv/sid")  # Apptainer is in Debian's sid alone: tests/root/packages.py
_APPLETS: Final = ("cat", "env", "id", "ls", "mknod", "sh", "true")
CDI: Final = "podman by CDI"
# runc, since crun wants one version of cgroups alone.
PODMAN: Final = (
    "podman --root ~/podman --runroot ~/podman-run --storage-driver vfs --cgroup-manager cgroupfs"
    " --events-backend none --runtime runc run --rm --network none --ulimit host"
)
_CHROOT: Final = 'mount --rbind /dev $0/dev; exec /usr/sbin/chroot $0 "$@"'
# What a job writes before the command that is to run in there, by kind. Podman's root is the
# user's own copy: podman makes files in it.
STARTS: Final[Mapping[str, str]] = {
    "apptainer": "apptainer --quiet exec $IMAGE",
    "apptainer --cleanenv": "apptainer --quiet exec --cleanenv $IMAGE",
    "apptainer --nv --containall": "apptainer --quiet exec --nv --containall $IMAGE",
    "bwrap": "bwrap --bind $IMAGE / --dev-bind /dev /dev",
    "ch-run": "ch-run $IMAGE --",
    "unshare": f"unshare --map-root-user --mount sh -c '{_CHROOT}' $IMAGE",
    "podman": f"{PODMAN} -e CUDA_VISIBLE_DEVICES $NODES --rootfs ~/image",
    CDI: f"{PODMAN} -e CUDA_VISIBLE_DEVICES $GPULOCK_CDI --rootfs ~/image",
}
WITH_DRIVER: Final = {name for name in STARTS if name.startswith("apptainer")} | {CDI}
PREPARE: Final = """
export XDG_RUNTIME_DIR=~/run
mkdir -p ~/run
[ -d ~/image ] || cp -r $IMAGE ~/image
# podman 5 refuses a --device that it may not open itself
NODES=$(for node in /dev/nvidia*; do printf ' --volume=%s:%s:dev' "$node" "$node"; done)
"""
# What tests.labs.common.device_nodes.PROBE prints, by a shell; the mask; the driver.
_PROBE: Final = r"""
for node in /dev/nvidia*; do
    case $(cat $node 2>&1) in
    *": No such device or address") said=ENXIO ;;
    *": Operation not permitted") said=EPERM ;;
    *": Permission denied") said=EACCES ;;
    *) said=OTHER ;;
    esac
    echo "${node##*/}=$said"
done
echo "mask=$CUDA_VISIBLE_DEVICES"
echo "driver=$(cat /nvlib/libcuda.so.1 2>/dev/null)"
"""
# "$1" sid's root, "$2" the folder of nodes, "$3" a layer over /usr, if any.
_FIT: Final = r"""
set -eu
mount -t overlay -o "lowerdir=${3:+$3:}$1/usr:/usr" gpulock-sid /usr
cp -a "$1/etc/apptainer" /etc/
mkdir -p /var/lib/apptainer/mnt/session /run/dev/up /run/dev/work /run/dev/before /run/dev/host
# As on a machine that has GPUs: its nodes are there before, and must be neither seen nor opened.
for node in nvidiactl:255 nvidia9:9; do
    mknod "/run/dev/host/${node%:*}" c 195 "${node#*:}"
done
mount --rbind /dev /run/dev/before
layers=lowerdir=/run/dev/host:/dev,upperdir=/run/dev/up,workdir=/run/dev/work
mount -t overlay -o "$layers" gpulock-dev /dev
mount --rbind /run/dev/before/pts /dev/pts
mount -t tmpfs -o mode=1777,nosuid,nodev gpulock-shm /dev/shm # the machine's may be root's alone
[ "$(stat -f -c %T /dev)" = overlayfs ]
rm -rf /dev/nvidia* # hides them in this layer, and changes nothing below it
cd "$2"
find . -type c | while read -r node; do
    mkdir -p "/dev/${node%/*}"
    : >"/dev/$node"
    mount --bind "$node" "/dev/$node"
done
"""
# Nothing of /dev itself may be removed, which is what is bound to /run/dev/before.
_STRIP: Final = """
set -eu
umount -l /dev /run/dev/before /usr
rmdir /run/dev/before
rm -r --one-file-system /run/dev
"""


class Seen(NamedTuple):
    """What a job saw in a container: nodes by error, its mask, the driver's version."""

    opens: dict[str, set[str]]
    mask: str | None
    driver: str | None


class Boxes:
    """What jobs need to start containers on a node that is fitted out for it."""

    def __init__(self, machine: Machine, settings: Settings) -> None:
        """Make an image, and files of the node's driver, in the lab's folder."""
        self.image = machine.lab / "container-image"
        sets = machine.lab / "sets"
        self.version = loaded_driver_version(settings.driver_root)
        self.keys = {"DEV_ROOT": "/dev", "DRIVER_DIR": str(sets), "CDI_DIR": "/run/cdi"}
        if not self.image.exists():
            make_image(self.image)
        add_driver(sets, self.version)  # a test before may have had another one

    def script(self) -> str:
        """Return what a job runs to look round in each kind of container; `out` ends it."""
        lines = [f"echo in\n{start} sh /probe\n" for start in STARTS.values()]
        return "".join([f"IMAGE={self.image}", PREPARE, *lines, "echo out\n"])


def make_image(folder: Path) -> None:
    """Make the root of a small container: a shell, a few programs, and a probe."""
    for name in ("bin", "dev", "etc", "home", "mnt/0", "proc", "sys", "tmp", "var/tmp"):
        (folder / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox
    shutil.copy(busybox, folder / "bin/busybox")
    for name in _APPLETS:
        (folder / "bin" / name).symlink_to("busybox")
    for name in ("passwd", "group", "resolv.conf", "hosts", "localtime"):
        (folder / "etc" / name).touch()
    (folder / "probe").write_text(_PROBE)


def add_driver(sets: Path, version: str) -> None:
    """Put a driver's files where containers look for them."""
    for part, name in (("bin", "nvidia-smi"), ("lib", "libcuda.so.1")):
        (sets / version / part).mkdir(parents=True, exist_ok=True)
        (sets / version / part / name).write_text(f"{version}\n")


@contextmanager
def fitted(machine: Machine, nodes: Path, layer: str = "") -> Generator[None]:
    """Let a node have container programs, and these device nodes in /dev."""
    _run(machine, _FIT, str(SID), str(nodes), layer)
    try:
        yield
    finally:
        _run(machine, _STRIP)


def seen(text: str) -> dict[str, Seen]:
    """Return what `Boxes.script` printed, by the kind of container."""
    parts = text.partition("\nout\n")[0].split("\nin\n")[1:]
    return {name: _seen(part) for name, part in zip(STARTS, parts)}


def _seen(part: str) -> Seen:
    found = {name: value for name, _, value in (line.partition("=") for line in part.splitlines())}
    return Seen(opened(part), found.get("mask"), found.get("driver"))


def _run(machine: Machine, script: str, *args: str) -> None:
    done = machine.run(["sh", "-c", script, "containers", *args])
    if done.returncode != 0:
        raise LabError(f"containers on {machine.name}: {done.stdout}{done.stderr}")
