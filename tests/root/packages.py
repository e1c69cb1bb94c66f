# SPDX-License-Identifier: Apache-2.0
"""Which of Debian's packages each layer of a private root has."""

from __future__ import annotations

from typing import NamedTuple


class Other(NamedTuple):
    """Packages of another part of the archive, unpacked into a folder below /srv."""

    release: str
    component: str
    packages: tuple[str, ...]
    folder: str
    machine: str = "amd64"


class Layer(NamedTuple):
    """A part of a root: packages that the layer `below` has not, and others beside them."""

    release: str
    packages: tuple[str, ...]
    below: str = ""
    others: tuple[Other, ...] = ()
    extra: str = "test"  # of pyproject.toml, with which gpulock is installed; empty: not at all
    oldest: bool = False  # what gpulock needs: of the oldest versions that pyproject.toml admits


_PYTHON = ("python3", "python3-venv", "gcc", "libc6-dev", "make", "strace", "openssl", "git")
_NEEDED = ("python3-bcrypt", "python3-psutil", "python3-yaml")  # by gpulock's packages
_PACKAGERS = ("apt", "dnf", "rpm", *_NEEDED)
_TOOLS = (
    *("bsdutils", "ca-certificates", "curl", "debian-archive-keyring", "gpgv", "iproute2", "less"),
    *("libpam-modules", "man-db", "mawk", "mount", "netbase", "passwd", "procps", "psmisc"),
    *("tcsh", "tzdata", "util-linux", "zsh"),
)
_DISTUTILS = ("python3-distutils",)
_SLURM = (
    *("slurmctld", "slurmd", "slurm-client", "libslurm-dev", "libpam-slurm-adopt", "munge"),
    *("dbus", "prometheus", "systemd"),
)
_SGE = ("gridengine-master", "gridengine-exec", "gridengine-client")
_IMAGES = ("bubblewrap", "busybox-static", "fuse2fs", "fuse3", "squashfs-tools", "squashfuse")
_CONTAINERS = ("charliecloud-runtime", "podman", "runc")
_LABS = (
    *("dbus-user-session", "libbsd-dev", "libcap-dev", "libpam-systemd"),
    *("docker.io", "lintian", "perl", "tmux"),
)
_NVML = ("slurm-wlm-nvml-plugin",)
_APPTAINER = (
    *("apptainer", "coreutils", "dash", "fuse2fs", "fuse3", "mount"),
    *("squashfs-tools", "squashfuse", "util-linux"),
)

_ARM = (
    *("base-files", "bash", "coreutils", "dash", "diffutils", "dpkg", "findutils", "grep"),
    *("libc-bin", "mawk", "passwd", "procps", "python3", "python3-psutil", "sed", "tar"),
    "util-linux",
)
_OF_SID = Other("sid", "main", _APPTAINER, "sid")  # Apptainer is in no other release


def _newer(release: str) -> Layer:
    """Return the root of a newer Slurm and Python."""
    packages = (*_PYTHON, *_TOOLS, *_PACKAGERS, *_SLURM, *_IMAGES, *_CONTAINERS)
    others = (Other(release, "contrib", _NVML, "slurm-nvml"), _OF_SID)
    return Layer(release, packages, others=others)


LAYERS = {
    "bullseye": Layer("bullseye", (*_PYTHON, *_DISTUTILS, *_TOOLS, *_PACKAGERS), oldest=True),
    "bookworm": Layer("bookworm", (*_PYTHON, *_DISTUTILS, *_TOOLS, *_SLURM, *_SGE), extra="dev"),
    "trixie": _newer("trixie"),
    "sid": _newer("sid"),
    "labs": Layer(
        "bookworm",
        (*_IMAGES, *_CONTAINERS, *_LABS, *_PACKAGERS),
        below="bookworm",
        others=(
            Other("bookworm", "contrib", _NVML, "slurm-nvml"),
            _OF_SID,
        ),
        extra="",
    ),
    "arm64": Layer(  # another machine's root, whose programs QEMU plays
        "bookworm",
        ("qemu-user-static",),
        below="labs",
        others=(Other("bookworm", "main", _ARM, "arm64", "arm64"),),
        extra="",
    ),
}
