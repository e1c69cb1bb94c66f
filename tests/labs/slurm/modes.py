# SPDX-License-Identifier: Apache-2.0
"""The two ways a site may run gpulock under Slurm, set up on every node of the lab."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from gpulock.install.slurm.gres import GresSource, gres_meaning, slurm_map_text
from gpulock.install.slurm.slurm_conf import read_node_lines
from gpulock.slurm.gres_map import gres_conf_version
from tests.labs.common.installed import variables
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.lab import JobId
from tests.support.wait import wait_until

REQUEUE_EXIT: Final = "213"
NODE: Final = "slnode1"
SLURM_CONF: Final = {"RequeueExit": REQUEUE_EXIT, "LaunchParameters": "use_interactive_step"}
# a job is not missed whose slurmd was killed a while ago (22.05, `_purge_missing_jobs`)
EXTRA: Final = {**SLURM_CONF, "KillWait": "1", "BatchStartTimeout": "120"}
MORE: Final = {NODE: range(16)}  # Slurm believes in four times as many devices as there are
TWO: Final = "--gres=gpu:2"
SHOW: Final = "env | grep -E '^(CUDA|NVIDIA|GPU|APPTAINERENV|SINGULARITYENV)' | sort\n"


class Mode(Protocol):
    """One of the two ways; `keys` are settings of gpulock, `setup` what the lab's Slurm is."""

    def __call__(
        self, gpus: Gpulock, keys: Mapping[str, str] | None = None, **setup: Any
    ) -> None: ...


def by_gpulock(gpus: Gpulock, keys: Mapping[str, str] | None = None, **setup: Any) -> None:
    """Let gpulock choose: Slurm counts, and sets no variable (Flags=no_gpu_env)."""
    setup.setdefault("gres", "gpulock")
    gpus.prepare(**{"extra": SLURM_CONF, **setup})
    for node in gpus.slurm.nodes:
        gpus.configure(node, **settings(gpus, SLURM_DEVICE_SELECTION="gpulock", **(keys or {})))
        if gpus.slurm.setup.shares:
            write_map(gpus, node, gpus.slurm.setup.minors(node))


def by_slurm(gpus: Gpulock, keys: Mapping[str, str] | None = None, **setup: Any) -> None:
    """Let Slurm choose, by positions in gres.conf."""
    gpus.prepare(**{"extra": SLURM_CONF, **setup}, gres="slurm")
    for node in gpus.slurm.nodes:
        gpus.configure(node, **settings(gpus, SLURM_DEVICE_SELECTION="slurm", **(keys or {})))
        write_map(gpus, node, gpus.slurm.setup.minors(node))


def settings(gpus: Gpulock, **keys: str) -> dict[str, str]:
    """Return the settings of a node of the lab."""
    return {"SLURM_CONF": str(gpus.slurm.lab / "etc/slurm.conf"), **keys}


def write_map(gpus: Gpulock, node: str, places: Sequence[int | str]) -> None:
    """Write what `gpulock install slurm` finds: the minor, or instance, at each position."""
    source = gpus.slurm.lab / "etc/gres.conf"
    state = gpus.slurm.path_in(node, "/var/lib/gpulock")
    said = read_node_lines(source, node)
    compared = GresSource(str(source), gres_conf_version(str(source)), gres_meaning(said))
    text = slurm_map_text(compared, list(map(str, places)), [*gpus.slurm.setup.shares])
    (state / "slurm-map").write_text(text)


def run(gpus: Gpulock, *args: str, script: str = SHOW) -> dict[str, str]:
    """Run a batch job to its end; return the variables it printed."""
    job = gpus.slurm.submit("slalice", *args, script=script)
    gpus.slurm.wait_done(job)
    return variables(gpus.slurm.said(job))


def wait_said(gpus: Gpulock, job: JobId, word: str) -> str:
    """Wait until a batch job has printed a word; return all it has printed."""
    slurm = gpus.slurm
    return wait_until(
        lambda: said if word in (said := slurm.said(job)) else None,
        why=f"job {job} to print {word}",
    )
