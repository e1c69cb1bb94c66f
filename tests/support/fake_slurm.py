#!/usr/bin/python3 -IS
# SPDX-License-Identifier: Apache-2.0
"""Play `scontrol show config` and `slurmd -G` from files that a real Slurm printed.

The files lie in the folder `state` beside `bin` and `sbin`: `config` and `gres`; where there
is a `down`, slurmctld does not answer.
"""

import os
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def read(name: str) -> str:
    with open(f"{HERE}/state/{name}", encoding="utf-8") as file:
        return file.read()


def scontrol(arguments: list[str]) -> int:
    if os.path.exists(f"{HERE}/state/down"):
        print("slurm_load_ctl_conf error: Unable to contact slurm controller", file=sys.stderr)
        return 1
    assert arguments == ["show", "config"]
    print(read("config"), end="")
    return 0


def slurmd(_: list[str]) -> int:
    print(read("gres"), end="", file=sys.stderr)
    return 0


if __name__ == "__main__":
    play = scontrol if os.path.basename(__file__) == "scontrol" else slurmd
    sys.exit(play(sys.argv[1:]))
