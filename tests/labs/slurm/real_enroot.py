# SPDX-License-Identifier: Apache-2.0
"""`enroot start` in a job, with the real enroot: CONTRIBUTING.md says how it is run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any, Final

import pytest

from gpulock.install.container_hooks import (
    ENROOT_HOOK,
)
from gpulock.install.files import find_share_folder
from tests.labs.slurm.enroot import cli_calls
from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.modes import NODE, by_slurm, variables
from tests.labs.slurm.pyxis import Pyxis, with_pyxis

pytestmark = pytest.mark.lab
MASKS = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "GPULOCK_DEVICES")
ONE: Final = "srun -n1 --gres=gpu:1 --exact"
FORMS: Final = {
    "two steps beside each other": f"({ONE} START a b & {ONE} START b a; wait)",
    "--gpus-per-task": "srun -n2 --gpus-per-task=1 --exact START",
    "--gpu-bind": "srun -n2 --gres=gpu:2 --gpu-bind=map_gpu:1,0 START",
    "none": "srun -n1 --gres=none START",
    "all": "srun -n1 --gres=gpu:3 START",
}
# One line a container: what it was told, and the minors that it can open.
START: Final = """#!/bin/sh
[ -z "$1" ] || { touch "$1"; until [ -e "$2" ]; do sleep 0.1; done; }
exec enroot start -m @DEV@:/gpus it sh -c '
opens=
for d in 0 1 2 3; do
    case $( (: </gpus/nvidia$d) 2>&1) in *"No such device or address"*) opens=$opens$d,;; esac
done
echo "told $CUDA_VISIBLE_DEVICES;$NVIDIA_VISIBLE_DEVICES;$GPULOCK_DEVICES;${opens%,}"'
"""


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


@pytest.mark.parametrize("constrain", [True, False], ids=["constrained", "open"])
def test_steps_that_start_enroot_by_hand_have_each_their_own_cards(
    slurm_gpus: Gpulock, constrain: bool
) -> None:
    order = (3, 1, 0, 2)

    def mode(gpus: Gpulock, keys: Mapping[str, str] | None = None, **setup: Any) -> None:
        setup |= {"proctrack": "cgroup", "constrain_devices": True} if constrain else {}
        by_slurm(gpus, keys, order={NODE: order}, **setup)

    slurm = slurm_gpus.slurm
    dev = str(slurm.device(NODE, 0).parent)
    with with_pyxis(slurm_gpus, mode, DEV_ROOT=str(slurm.lab / "dev" / NODE)) as pyxis:
        shutil.copy(
            find_share_folder() / "prolog/enroot" / ENROOT_HOOK, slurm.lab / "enroot/etc/hooks.d"
        )
        home = slurm.users["slalice"].home
        start = home / "start"
        start.write_text(START.replace("@DEV@", dev))
        start.chmod(0o755)
        minors = {gpu["uuid"]: str(gpu["minor"]) for gpu in slurm_gpus.status(NODE)["gpus"]}
        for form, command in FORMS.items():
            for name in "ab":
                (home / name).unlink(missing_ok=True)
            cli_calls(slurm)
            script = f"enroot create -f -n it {pyxis.image} >/dev/null\n{command}\n"
            job = slurm.submit(
                "slalice",
                *("-n3", "--gres=gpu:3", "-w", NODE),
                script=script.replace("START", str(start)),
                env={"PATH": "/usr/local/sbin:/usr/bin:/bin"},
            )
            slurm.wait_done(job)
            said = slurm.said(job)
            print(form, said, cli_calls(slurm))
            lines = [line[5:] for line in said.splitlines() if line.startswith("told ")]
            assert len(lines) == (1 if form in ("none", "all") else 2), (form, said)
            for line in lines:
                mask, nvidia, own, opens = line.split(";")
                named = [minors[uuid] for uuid in own.split(",") if uuid]
                assert nvidia == (own or "void"), (form, said)
                assert len(named) == {"none": 0, "all": 3}.get(form, 1), (form, said)
                if constrain:
                    assert sorted(named) == [n for n in opens.split(",") if n], (form, said)
                else:
                    assert named == [str(order[int(n)]) for n in mask.split(",") if n], (form, said)
