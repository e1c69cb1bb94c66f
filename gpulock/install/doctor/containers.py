# SPDX-License-Identifier: Apache-2.0
"""What doctor looks at for containers: the driver set, hooks of enroot and podman.

gpulockd says where it cannot write the CDI spec. What rules of Apptainer and Docker do to a job's
container stands in docs/containers.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpulock.errors import Refusal
from gpulock.install.doctor.check import DRIVER, INSTALLED, Check, Finding, fault, warning
from gpulock.install.versions import CURRENT, FOLDER
from gpulock.job.environment import driver_binds
from gpulock.node.settings import Settings

# Where a link leads to our hook: before 98-nvidia.sh, which reads what it writes; rootless podman
# looks nowhere else.
ENROOT_HOOK: Final = "etc/enroot/hooks.d/97-gpulock.sh"
PODMAN_HOOK: Final = "usr/share/containers/oci/hooks.d/97-gpulock.json"
# NVIDIA's hook and CDI specs: with one of them podman gives a container more than its job's GPUs
NVIDIA_SERVES: Final = (
    "usr/share/containers/oci/hooks.d/oci-nvidia-hook.json",
    "etc/cdi/nvidia.yaml",
    "var/run/cdi/nvidia.yaml",
)


def container_checks(settings: Settings, root: Path = Path("/")) -> list[Check]:
    """Return what hinders containers; of a simulated node nothing outside itself is looked at."""
    checks = [Check("driver set", lambda: check_driver_dir(settings), (INSTALLED, DRIVER))]
    hooks = Check("containers", lambda: check_container_hooks(root), (INSTALLED, DRIVER))
    return checks if settings.simulation else [*checks, hooks]


def check_driver_dir(settings: Settings) -> Iterator[Finding]:
    """Look whether DRIVER_DIR has this node's driver."""
    try:
        driver_binds(settings)
    except Refusal as refusal:
        yield fault(f"{refusal.why}: no job with GPUs starts", refusal.do)


def check_container_hooks(root: Path) -> Iterator[Finding]:
    """Look whether containers that are given GPUs in a job get its mask, too."""
    enroot, podman = root / ENROOT_HOOK, root / PODMAN_HOOK
    if not Path(f"{root}{FOLDER / CURRENT}").exists():
        return  # no job gets a mask here, or the installation says so
    link = f"ln -sf {FOLDER / CURRENT}"  # one that leads nowhere may be there
    if enroot.parent.is_dir() and not enroot.is_file():
        what = "enroot start gives a container no mask of the job, and all GPUs"
        yield warning(what, f"{link}/enroot/{enroot.name} /{ENROOT_HOOK}", "enroot")
    serving = [name for name in NVIDIA_SERVES if (root / name).exists()]
    if serving and (root / "usr/bin/podman").exists() and not podman.is_file():
        what = f"/{serving[0]} gives a container in a job every GPU, and it has no mask"
        folder = f"mkdir -p {Path('/', PODMAN_HOOK).parent}"
        yield warning(what, f"{folder}; {link}/podman/{podman.name} /{PODMAN_HOOK}", "podman")
