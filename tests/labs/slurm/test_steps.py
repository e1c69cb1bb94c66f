# SPDX-License-Identifier: Apache-2.0
"""A step of a real Slurm is told the names of its own devices, those that its cgroup opens."""

from __future__ import annotations

from typing import Final

import pytest

from tests.labs.slurm.gpulock import Gpulock
from tests.labs.slurm.modes import NODE, by_slurm

pytestmark = pytest.mark.lab
ONE: Final = "srun -n1 --gres=gpu:1 --exact"
FORMS: Final = {
    "two steps beside each other": f"({ONE} TELL a b & {ONE} TELL b a; wait)",
    "--gpus-per-task": "srun -n2 --gpus-per-task=1 --exact TELL",
    "--gpu-bind=single": "srun -n2 --gres=gpu:2 --gpu-bind=single:1 TELL",
    "--gpu-bind=map_gpu": "srun -n2 --gres=gpu:2 --gpu-bind=map_gpu:1,0 TELL",
    "none": "srun -n2 --gres=none TELL",
    "all": "srun -n2 --gres=gpu:3 TELL",
    "batch": "TELL",
}
# one line a task: its mask, the names it was told three times, and the minors that it can open
TELL: Final = r"""#!/bin/bash
opens=
for d in @DEV@/nvidia[0-3]; do # a test before may have made more than Slurm knows of
    (: <"$d") 2>&1 | grep -q 'No such device or address' && opens+=${d##*nvidia},
done
cdi=$(printf '%s,' ${GPULOCK_CDI//--device=gpulock.io\/gpu=/})
echo "told $CUDA_VISIBLE_DEVICES;$NVIDIA_VISIBLE_DEVICES;$GPULOCK_DEVICES;${cdi%,};${opens%,}"
[ -z "$1" ] || { touch $1; until [ -e $2 ]; do sleep 0.1; done; }
"""


@pytest.mark.parametrize(
    "constrain", [pytest.param(True, marks=pytest.mark.short), False], ids=["constrained", "open"]
)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)], ids=["in order", "shuffled"])
def test_a_task_is_told_the_names_of_what_it_can_open(
    slurm_gpus: Gpulock, order: tuple[int, ...], constrain: bool
) -> None:
    """Another step's GPU is never named: by UUID, to containers, or by CDI."""
    slurm = slurm_gpus.slurm
    keys = {"DEV_ROOT": str(slurm.lab / "dev" / NODE), "CDI_DIR": "/run/cdi"}
    confined = {"proctrack": "cgroup"} if constrain else {}
    by_slurm(slurm_gpus, keys, order={NODE: order}, constrain_devices=constrain, **confined)
    home = slurm.users["slalice"].home
    tell = home / "tell"
    tell.write_text(TELL.replace("@DEV@", str(slurm.device(NODE, 0).parent)))
    tell.chmod(0o755)
    by_uuid = {gpu["uuid"]: gpu for gpu in slurm_gpus.status(NODE)["gpus"]}
    first = slurm.submit("slbob", "--gres=gpu:1", "-w", NODE, script="exec sleep 600\n")
    slurm.wait_running(first)
    for form, command in FORMS.items():
        for name in "ab":
            (home / name).unlink(missing_ok=True)
        script = f"{command.replace('TELL', str(tell))}\n"
        job = slurm.submit("slalice", "-n3", "--gres=gpu:3", "-w", NODE, script=script)
        slurm.wait_done(job)
        said = slurm.said(job)
        lines = [line.removeprefix("told ") for line in said.splitlines() if "told " in line]
        assert len(lines) == (1 if form == "batch" else 2), (form, said)
        for line in lines:
            mask, nvidia, own, cdi, opens = line.split(";")
            assert nvidia == (own or "void"), (form, said)
            named = [by_uuid[uuid] for uuid in own.split(",") if uuid]
            assert [gpu["id"] for gpu in named] == [name for name in cdi.split(",") if name]
            minors = [str(gpu["minor"]) for gpu in named]
            if constrain:
                assert sorted(minors) == opens.split(",") if opens else not minors, (form, said)
                assert mask == ",".join(map(str, range(len(minors)))), (form, said)
            else:
                assert minors == [str(order[int(n)]) for n in mask.split(",") if n], (form, said)
            assert len(minors) == {"none": 0, "all": 3, "batch": 3}.get(form, 1), (form, said)
    slurm.scancel(first)
