# SPDX-License-Identifier: Apache-2.0
"""`enroot start` in a job, with the real enroot: `make lab-pyxis` names this file."""

from __future__ import annotations

import shutil

import pytest

from gpulock.install.hooks import find_share_folder
from gpulock.install.planner import ENROOT_HOOK
from tests.labs.slurm.enroot import cli_calls
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.modes import NODE, by_slurm, variables
from tests.labs.slurm.pyxis import Pyxis, with_pyxis

pytestmark = pytest.mark.lab
MASKS = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "GPULOCK_DEVICES")


def started(pyxis: Pyxis, *words: str) -> dict[str, str]:
    """Return the variables of a container that a job starts."""
    slurm = pyxis.gpus.slurm
    script = f"enroot create -f -n it {pyxis.image} >/dev/null\nsrun enroot start it env\n"
    path = {"PATH": "/usr/local/sbin:/usr/bin:/bin"}
    job = slurm.submit("slalice", "-w", NODE, *words, script=script, env=path)
    slurm.wait_done(job)
    return variables(slurm.said(job))


def test_enroot_start_has_the_jobs_mask_by_gpulocks_hook(slurm_gpus: Gpulock) -> None:
    with with_pyxis(slurm_gpus, by_slurm) as pyxis:
        hooks = slurm_gpus.slurm.lab / "enroot/etc/hooks.d"
        (hooks / ENROOT_HOOK).unlink(missing_ok=True)
        assert started(pyxis, "--gres=gpu:2")["CUDA_VISIBLE_DEVICES"] == "9"  # the image's
        shutil.copy(find_share_folder() / "prolog/enroot" / ENROOT_HOOK, hooks)
        cli_calls(slurm_gpus.slurm)
        uuids = [row["uuid"] for row in slurm_gpus.status(NODE)["gpus"][:2]]
        seen = started(pyxis, "--gres=gpu:2")
        assert [seen.get(name) for name in MASKS] == ["0,1", *[",".join(uuids)] * 2]
        assert [f"--device={','.join(uuids)} " in call for call in cli_calls(slurm_gpus.slurm)] == [
            True
        ]
        none = started(pyxis)
        assert [none.get(name) for name in MASKS] == ["", "void", ""]
