# SPDX-License-Identifier: Apache-2.0
"""The layers of gpulock, and what each may import: cold -> warm -> hot, never back."""

from __future__ import annotations

import sys

COLD = frozenset({"cli", "install", "report", "simulate", "text"})
WARM = frozenset({"daemon", "workstation"})
SCHEDULERS = frozenset({"sge", "slurm"})

RANK = {"hot": 0, "warm": 1, "cold": 2}

# Hot is all that a hook loads. What begins with _ is C: its Python face costs 4-10 ms.
HOT_STANDARD = frozenset(
    {"os", "sys", "gc", "marshal", "posix", "time", "errno", "stat", "fcntl", "syslog", "select"}
    | {"_signal", "_struct", "_socket", "_thread"}
)
# What a module may load beyond that, when it is needed and not before.
HOT_RARELY = {
    "gpulock.node.mounts": frozenset({"ctypes"}),
    "gpulock.isolation.bpf": frozenset({"_ctypes"}),
    "gpulock.hooks.drop_privileges": frozenset({"ctypes"}),
}
# A hook may load one of these. contextlib loads functools, so with it the other is free.
HOT_ONE_OF = ("contextlib", "functools")

# pynvml is nobody's here: gpulock_exporter.nvml.source alone imports it.
THIRD_PARTY = {
    "hot": frozenset[str](),
    "warm": frozenset({"filelock", "psutil"}),
    "cold": frozenset({"click", "filelock", "prometheus_client", "psutil"}),
}


def part_of(module: str) -> str:
    """Name the part of gpulock that a module belongs to: `gpulock.cli.why` is of `cli`."""
    return (module + "..").split(".")[1]


def layer_of(module: str) -> str:
    """Name the layer of one of gpulock's modules."""
    part = part_of(module)
    return "cold" if part in COLD else "warm" if part in WARM else "hot"


def is_ours(module: str) -> bool:
    """Tell gpulock's own modules from all others."""
    return module.partition(".")[0] == "gpulock"


def violation(importer: str, imported: str) -> str | None:
    """Say which rule it breaks that `importer` imports `imported`, or None."""
    if is_ours(imported):
        return _own_violation(importer, imported)
    layer = layer_of(importer)
    package = imported.partition(".")[0]
    if package not in sys.stdlib_module_names:
        allowed = package in THIRD_PARTY[layer]
        return None if allowed else f"{layer} modules do not import {package}"
    affordable = {*HOT_STANDARD, *HOT_ONE_OF, *HOT_RARELY.get(importer, ()), "__future__"}
    if layer == "hot" and package not in affordable:
        return f"hooks cannot afford {package}"
    return None


def _own_violation(importer: str, imported: str) -> str | None:
    layer, below = layer_of(importer), layer_of(imported)
    if RANK[below] > RANK[layer]:
        return f"{layer} does not import {below}"
    scheduler = part_of(imported)
    if layer == "hot" and scheduler in SCHEDULERS and part_of(importer) != scheduler:
        return f"only {scheduler} itself, warm and cold import gpulock.{scheduler}"
    return None
