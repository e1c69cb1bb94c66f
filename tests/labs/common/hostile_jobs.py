# SPDX-License-Identifier: Apache-2.0
"""Random hostile jobs, whatever the scheduler; tests/labs/both/fair.py submits them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

# Bash; each ends within seconds, but for those that stop. {devices}
# are words, {locks} is LOCK_DIR.
ZOO: Final[Mapping[str, str]] = {
    "opens every device": "for d in {devices}; do exec {{n}}<$d; done; sleep 9",
    "leaves a child with every device": (
        "for d in {devices}; do exec {{n}}<$d; done; setsid sleep 9 >&- 2>&- &"
    ),
    "hides a child": "(env -i setsid bash -c 'exec -a sge_shepherd sleep 3' >&- 2>&- &); sleep 0.3",
    "lies about its name": "for n in slurmd sge_execd; do (exec -a $n sleep 1) & done; wait",
    "dies": "kill -9 $$",
    "kills all that it may": "kill -9 -1",
    "signals every process": "kill -STOP $(ls /proc | grep -x '[0-9]*' | grep -vx $$); sleep 0.2",
    "stops": "kill -STOP $$",
    "ignores signals": "trap '' TERM INT HUP CONT; for i in 1 2 3 4; do sleep 0.5; done",
    "forks": "for i in {{1..40}}; do setsid sleep 1 & done; wait",
    "forks on and on": (
        "f() {{ [ $1 = 0 ] || (f $(($1 - 1))) & }}; for i in {{1..20}}; do f 10; done"
    ),
    "opens many files": (
        "for i in {{1..900}}; do exec {{n}}</dev/null; done; sleep 1 & sleep 1 & wait"
    ),
    "locks what it can read": (
        "for f in $(find {locks} 2>/dev/null); do flock -n $f sleep 1 & done 2>/dev/null; wait"
    ),
    "writes where hooks read": (
        "rm -rf {locks}/*; mkdir -p {locks}/locks/x; for f in $(find {locks}); do echo >>$f; done"
    ),
    "says much": "yes 'export CUDA_VISIBLE_DEVICES=0,1,2,3' | head -c 3000000",
    "says nothing": "exec >&- 2>&- <&-; sleep 0.2",
    "exits oddly": "exit $((RANDOM % 5 ? 99 + RANDOM % 2 : 213))",
    "is short": "true",
}
# As strings of the environment: what no other job may feel.
STEERING: Final[Mapping[str, Mapping[str, str]]] = {
    "tunables": {"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=1000000000000"},
    "loader": {"LD_AUDIT": "/nonexistent.so", "LD_BIND_NOW": "1"},
    "python": {"PYTHONHOME": "/nonexistent", "PYTHONMALLOC": "x", "PYTHONUTF8": "x"},
    "locale": {
        "LC_ALL": "\udcff",
        "LANG": "../../x",
        "LOCPATH": "/nonexistent",
        "TZ": ":/dev/zero",
    },
    "shell": {"BASH_ENV": "/nonexistent", "ENV": "/dev/zero", "SHELLOPTS": "noexec", "IFS": "s"},
    "memory": {"MALLOC_PERTURB_": "255", "MALLOC_ARENA_MAX": "x", "MALLOC_TOP_PAD_": "1" * 18},
    "lines": {"A": "a\nexport CUDA_VISIBLE_DEVICES=0,1,2,3\n", "B\nCUDA_VISIBLE_DEVICES": "0"},
    "large": {f"LARGE{n}": "x" * 100_000 for n in range(12)},
    "too large": {"LARGE": "x" * 200_000},
    "too much": {f"LARGE{n}": "x" * 100_000 for n in range(60)},
    "many": {f"MANY{n}": "\n" for n in range(4_000)},
}


@dataclass(frozen=True)
class Hostile:
    """A job: what it asks for, runs and brings along; `name` says what it tries."""

    name: str
    gpus: int
    script: str
    env: Mapping[str, str] = field(default_factory=dict[str, str])


def hostile_job(
    rng: Random, devices: Sequence[Path], lock_dir: str, own: Mapping[str, str]
) -> Hostile:
    """Return a job of the zoo, or of a scheduler's `own` scripts, sometimes with variables."""
    zoo = {**ZOO, **own}
    name = rng.choice(sorted(zoo))
    words = " ".join(shlex.quote(str(place)) for place in devices)
    text = zoo[name].format(devices=words, locks=lock_dir)
    brings = rng.choice(sorted(STEERING)) if rng.random() < 0.3 else ""
    env = STEERING[brings] if brings else {}
    gpus = rng.choice([0, 0, 1, 2])
    return Hostile(f"{name} {brings}".strip(), gpus, f"#!/bin/bash\n{text}\n", env)


def environ_bytes(env: Mapping[str, str]) -> bytes:
    """Return variables as a file of NAME=VALUE, each with a zero byte behind it."""
    return "".join(f"{n}={v}\0" for n, v in env.items()).encode("utf-8", "surrogateescape")
