# SPDX-License-Identifier: Apache-2.0
"""Machines that exist, as `gpulock simulate --preset` offers them.

Bus ids, NVLinks and NUMA nodes are those of the real machines: `nvidia-smi topo -m`
and NCCL topology dumps in NVIDIA/nccl issues 671 (DGX-1) and 1505 (DGX A100), and
NVIDIA's user guides. Bridges between root port and GPU that those do not name are filled in so
that exactly the GPUs which share a switch there share one here. Minors that differ from the
index are seen in PrincetonUniversity/jobstats issue 34.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from gpulock.simulate.machine import Gpu, GpuModel, Machine, MigDevice

_535 = "NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023"
_570 = (
    "NVIDIA UNIX Open Kernel Module for x86_64  570.172.08  Release Build  "
    "(dvs-builder@U22-I3-AF01-21-3)  Tue Jul  8 18:08:21 UTC 2025"
)

_V100 = GpuModel("Tesla V100-SXM2-32GB", 32768)
_A100 = GpuModel("NVIDIA A100-SXM4-80GB", 81920)
_H200 = GpuModel("NVIDIA H200", 143771)
_4090 = GpuModel("NVIDIA GeForce RTX 4090", 24564)

# DGX-1 with V100: a hybrid cube mesh, six NVLinks a card.
_CUBE_MESH = (
    *((0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 2), (1, 2, 2), (1, 3, 1), (1, 5, 2), (2, 3, 2)),
    *((2, 6, 1), (3, 7, 1), (4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2)),
)

# Memory of MIG profiles of the 80 GB card as NVML shows it (NVIDIA MIG user guide).
_1G, _2G, _3G = ("1g.10gb", 9728), ("2g.20gb", 19968), ("3g.40gb", 40192)
_MIXED = (
    MigDevice(2, 0, *_3G),
    MigDevice(3, 0, *_2G),
    MigDevice(9, 0, *_1G),
    MigDevice(10, 0, *_1G),
)
_HALVES = (MigDevice(1, 0, *_3G), MigDevice(2, 0, *_3G))


def _make_preset_gpus(
    slots: Iterable[tuple[str, str]], numa: Iterable[int], minors: Iterable[int]
) -> tuple[Gpu, ...]:
    """Return the GPUs of `slots`, each a bus number and its bridges, all in domain 0000."""
    return tuple(
        Gpu(f"0000:{bus}:00.0", tuple(f"0000:{b}" for b in bridges.split()), node, minor)
        for (bus, bridges), node, minor in zip(slots, numa, minors)
    )


_DGX1 = Machine(
    name="dgx1",
    summary="DGX-1: 8 V100, NVLink hybrid cube mesh, two GPUs a PCI switch",
    driver=_535,
    card=_V100,
    gpus=_make_preset_gpus(
        (
            *(("06", "00:02.0 03:00.0 04:08.0"), ("07", "00:02.0 03:00.0 04:10.0")),
            *(("0a", "00:03.0 08:00.0 09:08.0"), ("0b", "00:03.0 08:00.0 09:10.0")),
            *(("85", "80:02.0 82:00.0 83:08.0"), ("86", "80:02.0 82:00.0 83:10.0")),
            *(("89", "80:03.0 87:00.0 88:08.0"), ("8a", "80:03.0 87:00.0 88:10.0")),
        ),
        (0, 0, 0, 0, 1, 1, 1, 1),
        range(8),
    ),
    links=_CUBE_MESH,
)

_DGX_H200 = Machine(
    name="dgx-h200",
    summary="DGX H200: 8 H200 on NVSwitches, one PCI switch a GPU, minor is not index",
    driver=_570,
    card=_H200,
    gpus=_make_preset_gpus(
        (
            *(("1b", "15:01.0 16:00.0 17:02.0"), ("43", "3d:01.0 3e:00.0 3f:02.0")),
            *(("52", "4c:01.0 4d:00.0 4e:02.0"), ("61", "5b:01.0 5c:00.0 5d:02.0")),
            *(("9d", "97:01.0 98:00.0 99:02.0"), ("c3", "bd:01.0 be:00.0 bf:02.0")),
            *(("d1", "cb:01.0 cc:00.0 cd:02.0"), ("df", "d9:01.0 da:00.0 db:02.0")),
        ),
        (0, 0, 0, 0, 1, 1, 1, 1),
        (4, 5, 6, 7, 2, 3, 0, 1),
    ),
    nvswitch=True,
)

_A100_PLAIN = _make_preset_gpus(
    (
        ("07", "00:01.1 01:00.0 02:00.0 05:00.0 06:00.0"),
        ("0f", "00:01.1 01:00.0 02:04.0 0d:00.0 0e:00.0"),
        ("47", "40:01.1 41:00.0 42:00.0 45:00.0 46:00.0"),
        ("4e", "40:01.1 41:00.0 42:04.0 4c:00.0 4d:00.0"),
        ("87", "80:01.1 81:00.0 82:00.0 85:00.0 86:00.0"),
        ("90", "80:01.1 81:00.0 82:04.0 8e:00.0 8f:00.0"),
        ("b7", "b0:01.1 b1:00.0 b2:00.0 b5:00.0 b6:00.0"),
        ("bd", "b0:01.1 b1:00.0 b2:04.0 bb:00.0 bc:00.0"),
    ),
    (3, 3, 1, 1, 7, 7, 5, 5),
    (2, 3, 0, 1, 6, 7, 4, 5),
)
_A100_MIG = Machine(
    name="a100-mig",
    summary="DGX A100: 8 A100 80 GB, the first two split into six MIG instances",
    driver=_535,
    card=_A100,
    gpus=(
        dataclasses.replace(_A100_PLAIN[0], mig=_MIXED),
        dataclasses.replace(_A100_PLAIN[1], mig=_HALVES),
        *_A100_PLAIN[2:],
    ),
    nvswitch=True,
)

_WORKSTATION = Machine(
    name="workstation",
    summary="one processor, 2 RTX 4090, no NVLink, no PCI switch, NUMA node unknown",
    driver=_570,
    card=_4090,
    gpus=_make_preset_gpus((("01", "00:01.1"), ("41", "40:01.1")), (-1, -1), range(2)),
)

_CLASSROOM = dataclasses.replace(
    _WORKSTATION,
    name="classroom",
    summary="the workstation, whose second GPU is shared by four jobs (SHARES)",
    shares="1:4",
)

_MACHINES = (_DGX1, _DGX_H200, _A100_MIG, _WORKSTATION, _CLASSROOM)
PRESETS: Mapping[str, Machine] = {one.name: one for one in _MACHINES}
