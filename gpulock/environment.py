# SPDX-License-Identifier: Apache-2.0
"""The variables a job gets (design, section 7): a pure function of what was granted.

Hot. Every name here is written for every job, so that nothing which the user set stands. The
container twins carry a mask through `--cleanenv` and `--containall` (reference isolation C).
"""

import os

from gpulock import atomic
from gpulock.devices import Device
from gpulock.refusal import BROKEN, UNKNOWN, Refusal
from gpulock.settings import Settings

TWINS = ("APPTAINERENV_", "SINGULARITYENV_")
BIND_LISTS = ("APPTAINER_BINDPATH", "SINGULARITY_BINDPATH")
NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "GPULOCK_DEVICES",
    "GPU_DEVICE_ORDINAL",
)


def variables(
    granted: list[Device], settings: Settings, also: tuple[str, ...] = ()
) -> list[tuple[str, str]]:
    """Return the variables of a grant; `also` are names that get the mask as well (SGE_GPU).

    An empty grant masks everything. Raises Refusal(UNKNOWN) when the mask must hold UUIDs (by
    setting, or for a MIG instance, which has no index) and one is not known yet. Variables that
    cannot be told are left out, never wrong: `drop_names` keeps the user's own from standing.
    """
    uuids = ",".join([d.uuid for d in granted]) if all([d.uuid for d in granted]) else ""
    by_uuid = settings.visible_devices == "uuid" or any([d.parent for d in granted])
    if by_uuid and granted and not uuids:
        raise Refusal(
            UNKNOWN,
            "the driver does not tell the UUIDs yet, and the mask must hold them",
            "start nvidia-persistenced, or set VISIBLE_DEVICES=index",
        )
    mask = uuids if by_uuid else ",".join([str(d.index) for d in granted])
    pairs = [("CUDA_VISIBLE_DEVICES", mask), ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")]
    if uuids or not granted:
        pairs += [("NVIDIA_VISIBLE_DEVICES", uuids or "void"), ("GPULOCK_DEVICES", uuids)]
    if not by_uuid:
        pairs.append(("GPU_DEVICE_ORDINAL", mask))
    pairs += [(name, mask) for name in also]
    return [*pairs, *[(twin + name, value) for twin in TWINS for name, value in pairs]]


def drop_names(also: tuple[str, ...] = ()) -> frozenset[str]:
    """Return every name that `variables` may set: none of the user's may survive."""
    names = (*NAMES, *also)
    return frozenset([*names, *[twin + name for twin in TWINS for name in names]])


def driver_binds(settings: Settings) -> str:
    """Return the bind specification of this node's driver version, or nothing.

    Raises Refusal(BROKEN) when DRIVER_DIR has no such version: a container would start with
    another node's libcuda.
    """
    if not settings.driver_dir:
        return ""
    version = driver_version(settings.driver_root)
    folder = f"{settings.driver_dir}/{version}"
    for part in ("bin", "lib"):
        if not os.path.isdir(f"{folder}/{part}"):
            raise Refusal(
                BROKEN,
                f"no driver set for this node's driver {version}: {folder}/{part} is missing",
                "put the driver's files there, or unset DRIVER_DIR",
            )
    return f"{folder}/bin:/nvbin,{folder}/lib:/nvlib"


def driver_version(driver_root: str) -> str:
    """Return the loaded driver's version, as in `/proc/driver/nvidia/version`."""
    try:
        text = atomic.read_text(f"{driver_root}/version")
    except OSError as fault:
        raise Refusal(BROKEN, f"driver version: {fault}", "load the driver") from fault
    for word in text.partition("\n")[0].split():
        if word[:1].isdigit() and "." in word and word.replace(".", "").isdigit():
            return word
    raise Refusal(BROKEN, f"no driver version in {text[:60]!r}", "look at the driver")


def appended(old: str, binds: str) -> str:
    """Return a bind list with ours at its end, once."""
    return binds if not old else old if old.endswith(binds) else f"{old},{binds}"
