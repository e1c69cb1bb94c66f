# SPDX-License-Identifier: Apache-2.0
"""What doctor says of features that one release of Slurm has, and another has otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpulock.install.doctor.check import Check, fault, run_all, warning
from gpulock.install.slurm.site import SlurmSite, parse_slurm_release, slurm_release_fault
from gpulock.install.slurm.slurm_conf import SlurmConf, read_node_values
from gpulock.node.settings import Settings

_HOOKS_AS_ROOT: Final = (26, 5)  # docs/facts/slurm.md, hooks inside of the job
_TASK_PROLOG_WINS: Final = (23, 2)  # docs/facts/containers.md, oci bundles of slurm


def release_checks(settings: Settings, site: SlurmSite, conf: SlurmConf) -> list[Check]:
    """Return what is to be known of this node's release and the features it uses."""
    beside = site.conf.parent if site.conf else None
    release = parse_slurm_release(conf.get("SLURM_VERSION"))
    return run_all(
        {
            "Slurm release": lambda: check_slurmd_release(site),
            "RunInJob": lambda: check_run_in_job(conf, release),
            "oci.conf": lambda: check_oci_bundles(beside, release),
            "job_container.conf": lambda: check_private_folders(settings, site, conf),
        }
    )


def check_slurmd_release(site: SlurmSite) -> Iterator[Check]:
    """Look whether this node's Slurm is one that gpulock was run on."""
    if why := slurm_release_fault(site.release()):
        yield fault(why, "update Slurm, or gpulock uninstall slurm; see docs/slurm.md")


def check_run_in_job(conf: SlurmConf, release: tuple[int, int] | None) -> Iterator[Check]:
    """Warn of Epilogs that are not root's."""
    if conf.has("PrologFlags", "RunInJob") and release and release < _HOOKS_AS_ROOT:
        what = "before Slurm 26.05 an Epilog may start as the job's user: it frees nothing then"
        yield warning(what, "run gpulockd, or gpulock reap from cron; or take RunInJob out")


def check_oci_bundles(folder: Path | None, release: tuple[int, int] | None) -> Iterator[Check]:
    """Warn of containers that Slurm starts with a mask of their own."""
    if folder and (folder / "oci.conf").exists() and release and release < _TASK_PROLOG_WINS:
        what = "before Slurm 23.02 `srun --container` takes the bundle's own mask, not the job's"
        yield warning(what, "update Slurm; ConstrainDevices or ISOLATION=cgroup closes the others")


def check_private_folders(settings: Settings, site: SlurmSite, conf: SlurmConf) -> Iterator[Check]:
    """Look whether tasks see the folder in which their grant stands."""
    path = site.conf.with_name("job_container.conf") if site.conf else None
    used = conf.get("JobContainerType") + conf.get("NamespaceType")
    if path is None or not path.exists() or "tmpfs" not in used:
        return
    lists = read_node_values(path, "Dirs", site.node_names())
    folders = [one.strip() for text in lists for one in text.split(",") if one.strip()]
    inside = Path(settings.lock_dir)
    hiding = [one for one in folders if Path(one) in (inside, *inside.parents)]
    if hiding:
        what = f"Dirs has {hiding[0]}: a task does not see {inside}, and does not start"
        yield fault(what, f"take {hiding[0]} out of Dirs")
