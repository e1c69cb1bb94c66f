# SPDX-License-Identifier: Apache-2.0
"""The order of the packages: each imports itself and those before it, never back.

Hot is what a hook loads, warm what gpulockd adds, cold everything else.
"""

from __future__ import annotations

import sys

HOT = ("", "store", "node", "job", "alloc", "isolation", "hooks", "slurm", "sge")
WARM = (
    *(
        "daemon.core",
        "schedulers",
        "workstation",
        "daemon.reconcile",
        "daemon.slots",
        "daemon.history",
    ),
    *("daemon.idle", "daemon.health", "daemon.mps", "daemon"),
)
COLD = (
    *("text", "report", "install", "install.sge", "install.slurm", "install.systemd"),
    *("install.doctor", "simulate", "cli", "cli.status", "cli.claims", "cli.admin"),
)
ORDER = (*HOT, *WARM, *COLD)
SCHEDULERS = frozenset({"sge", "slurm"})

RANK = {"hot": 0, "warm": 1, "cold": 2}

# Hot is all that a hook loads. What begins with _ is C: its Python face costs 4-10 ms.
HOT_STANDARD = frozenset(
    {"os", "sys", "gc", "marshal", "posix", "time", "errno", "stat", "fcntl", "select", "itertools"}
    | {"_signal", "_struct", "_socket", "_thread"}
)
# What a module may load beyond that, when it is needed and not before.
HOT_RARELY = {
    "gpulock.node.file_tables": frozenset({"ctypes"}),
    "gpulock.node.mounts": frozenset({"ctypes"}),
    "gpulock.isolation.bpf": frozenset({"ctypes"}),
    "gpulock.sge.site_hook": frozenset({"pwd"}),
}
# A hook may load one of these. contextlib loads functools, so with it the other is free.
HOT_ONE_OF = ("contextlib", "functools")

# pynvml is nobody's here: gpulock_exporter.nvml alone imports it.
THIRD_PARTY = {
    "hot": frozenset[str](),
    "warm": frozenset({"psutil"}),
    "cold": frozenset({"click", "filelock", "prometheus_client", "psutil"}),
}

# The packages of gpulock_exporter in their order, and what each may import that is not ours.
EXPORTER = {
    "": frozenset[str](),
    "nvml": frozenset({"pynvml"}),
    "worker": frozenset[str](),
    "state": frozenset[str](),
    "files": frozenset[str](),
    "metrics": frozenset({"prometheus_client"}),
    "web": frozenset({"bcrypt", "yaml"}),
    "app": frozenset[str](),
}
# Beside hot modules: the service manager is spoken to in one place, what may hang is asked in one
# way, one table has the XIDs, one function reads why a card is out, times are said in one way.
EXPORTER_WARM = frozenset(
    {
        *("gpulock.daemon.core.background_call", "gpulock.daemon.core.journal"),
        *("gpulock.daemon.core.own_program", "gpulock.daemon.core.sample"),
        "gpulock.daemon.health.cards",
        *("gpulock.daemon.health.findings", "gpulock.daemon.health.recovery"),
        *("gpulock.text.words", "gpulock.workstation.waiting"),
    }
)


def package_of(module: str) -> str:
    """Name the package that a module belongs to: `gpulock.cli.status.why` is of `cli.status`."""
    name = module.partition(".")[2]
    while name not in ORDER:
        name = name.rpartition(".")[0]
    return name


def layer_of(module: str) -> str:
    """Name the layer of one of gpulock's modules."""
    package = package_of(module)
    return "hot" if package in HOT else "warm" if package in WARM else "cold"


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
    own, other = package_of(importer), package_of(imported)
    if layer == "hot" and other in SCHEDULERS and own != other:
        return f"only {other} itself, warm and cold import gpulock.{other}"
    if ORDER.index(other) > ORDER.index(own) and imported != "gpulock":
        return f"{own or 'the root'} stands before {other}"
    return None


def exporter_violation(importer: str, imported: str) -> str | None:
    """Say which rule it breaks that a module of the exporter imports `imported`, or None."""
    own, root = _exporter_package(importer), imported.partition(".")[0]
    if root == "gpulock":
        ours = layer_of(imported) == "hot" or imported in EXPORTER_WARM
        return None if ours else f"the exporter imports no {imported}"
    if root != "gpulock_exporter":
        foreign = root not in sys.stdlib_module_names and root not in EXPORTER[own]
        return f"{own or 'the root'} does not import {root}" if foreign else None
    other, order = _exporter_package(imported), [*EXPORTER]
    if order.index(other) > order.index(own) and imported != "gpulock_exporter":
        return f"{own or 'the root'} stands before {other}"
    if other == "nvml" and own not in (other, "worker"):  # a driver hangs who looks at it
        return f"only the worker imports {other}"
    return None


def _exporter_package(module: str) -> str:
    name = (module + "..").split(".")[1]
    return name if name in EXPORTER else ""
