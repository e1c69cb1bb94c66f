#!/usr/bin/python3 -IS
# SPDX-License-Identifier: Apache-2.0
"""Play `scontrol show` and `slurmd -G` from files that a real Slurm printed.

The files lie in the folder `state` beside `bin` and `sbin`: `config`, `node` and `gres`; where
there is a `down`, slurmctld does not answer.
"""

import os
import re
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def read(name: str) -> str:
    with open(f"{HERE}/state/{name}", encoding="utf-8") as file:
        return file.read()


def scontrol(arguments: list[str]) -> int:
    if os.path.exists(f"{HERE}/state/down"):
        print("slurm_load_ctl_conf error: Unable to contact slurm controller", file=sys.stderr)
        return 1
    if "-o" in arguments:
        for record in re.split(r"\n(?=NodeName=)", read("node")):
            print(" ".join(record.split()))
    else:
        print(read("config" if arguments[1] == "config" else "node"), end="")
    return 0


def slurmd(_: list[str]) -> int:
    print(read("gres"), end="", file=sys.stderr)
    return 0


if __name__ == "__main__":
    play = scontrol if os.path.basename(__file__) == "scontrol" else slurmd
    sys.exit(play(sys.argv[1:]))
