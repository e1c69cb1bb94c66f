# SPDX-License-Identifier: Apache-2.0
"""The variables a job gets (docs/facts/containers.md), by what was granted.

Hot. Every name here is written for every job, so that nothing which the user set stands. The
container twins carry a mask through `--cleanenv` and `--containall` (facts/containers.md, twins).
"""

import os

from gpulock.errors import BROKEN, UNKNOWN, Refusal, os_error_kind
from gpulock.node.devices import Device
from gpulock.node.settings import Settings
from gpulock.store import atomic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

CONTAINER_PREFIXES = ("APPTAINERENV_", "SINGULARITYENV_")
BIND_LISTS = ("APPTAINER_BINDPATH", "SINGULARITY_BINDPATH")
CDI_KIND = "gpulock.io/gpu"  # of gpulockd's spec, where CDI_DIR is set
NVIDIA_KIND = "nvidia.com/gpu"  # of nvidia-ctk's, and of nvidia-cdi-refresh of toolkit 1.18
NVIDIA_SPECS = ("/var/run/cdi/nvidia.yaml", "/etc/cdi/nvidia.yaml")
CDI_FLAGS = "GPULOCK_CDI"  # flags for who starts a container: they need no twins
MASK_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "GPULOCK_DEVICES",
    "GPU_DEVICE_ORDINAL",
)
SHARE_PARTS = "GPULOCK_SHARE"  # 1/4: of each card in the mask so many of its places
OPTIONAL_VARIABLES = (CDI_FLAGS, SHARE_PARTS, *[twin + SHARE_PARTS for twin in CONTAINER_PREFIXES])


def grant_variables(
    granted: list[Device], settings: Settings, also: tuple[str, ...] = ()
) -> list[tuple[str, str]]:
    """Return the variables of a grant; `also` are names that get the mask as well (SGE_GPU).

    An empty grant masks everything. Raises Refusal(UNKNOWN) when the mask must hold UUIDs (by
    setting, or for a MIG instance, which has no index) and one is not known yet. Variables that
    cannot be told are left out, never wrong: `drop_names` keeps the user's own from standing.
    """
    parts, places = "", granted
    if granted and granted[0].places:
        own, granted = granted, list({d.bus: d for d in granted}.values())
        parts = ",".join([f"{len([p for p in own if p.bus == d.bus])}/{d.places}" for d in granted])
    uuids = ",".join([d.uuid for d in granted]) if all([d.uuid for d in granted]) else ""
    by_uuid = settings.visible_devices == "uuid" or any([d.parent for d in granted])
    if by_uuid and granted and not uuids:
        raise Refusal(
            UNKNOWN,
            "the driver does not list the UUIDs yet, and the mask must hold them",
            "start nvidia-persistenced, or set VISIBLE_DEVICES=index",
        )
    mask = uuids if by_uuid else ",".join([str(d.index) for d in granted])
    pairs = [("CUDA_VISIBLE_DEVICES", mask), ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")]
    if uuids or not granted:
        pairs += [("NVIDIA_VISIBLE_DEVICES", uuids or "void"), ("GPULOCK_DEVICES", uuids)]
    if not by_uuid:
        pairs.append(("GPU_DEVICE_ORDINAL", mask))
    pairs += [(name, mask) for name in also]
    if parts:
        pairs.append((SHARE_PARTS, parts))
        if settings.share_mps:
            from gpulock.job.mps import mps_variables

            pairs += mps_variables(places, settings)
    twins = [(twin + name, value) for twin in CONTAINER_PREFIXES for name, value in pairs]
    kind, names = "", [d.id if d.parent else d.bus for d in granted]  # a share is of its card
    if settings.cdi_dir:
        kind = CDI_KIND
    elif (uuids or not granted) and any([os.path.exists(path) for path in NVIDIA_SPECS]):
        kind, names = NVIDIA_KIND, [d.uuid for d in granted]
    if kind:  # a flag each: podman 5 and Docker split no list
        pairs.append((CDI_FLAGS, " ".join([f"--device={kind}={name}" for name in names])))
    return [*pairs, *twins]


def grant_variable_names(also: tuple[str, ...] = ()) -> frozenset[str]:
    """Return every name that a grant may set: none of the user's may survive.

    Those of MPS are not among them: a user may run an MPS of one's own (gpulock.job.mps).
    """
    names = (*MASK_VARIABLES, *also)
    return frozenset(
        [
            *names,
            *OPTIONAL_VARIABLES,
            *[twin + name for twin in CONTAINER_PREFIXES for name in names],
        ]
    )


def driver_binds(settings: Settings) -> str:
    """Return the bind specification of this node's driver version, or nothing.

    Raises Refusal when DRIVER_DIR has no such version: a container would start with
    another node's libcuda. A `,` or `:` in its name would be two binds to a container.
    """
    if not settings.driver_dir:
        return ""
    version = loaded_driver_version(settings.driver_root)
    folder = f"{settings.driver_dir}/{version}"
    if not folder.isprintable() or any([c in folder for c in ",:\\"]):
        raise Refusal(UNKNOWN, f"DRIVER_DIR cannot be bound: {folder!r}", "give it a plain path")
    for part in ("bin", "lib"):
        if not os.path.isdir(f"{folder}/{part}"):
            raise Refusal(
                BROKEN if os.path.isdir(settings.driver_dir) else UNKNOWN,
                f"no driver set for this node's driver {version}: {folder}/{part} is missing",
                "put the driver's files there, or unset DRIVER_DIR",
            )
    return f"{folder}/bin:/nvbin,{folder}/lib:/nvlib"


def loaded_driver_version(driver_root: str) -> str:
    """Return the loaded driver's version, as in `/proc/driver/nvidia/version`."""
    try:
        text = atomic.read_text(f"{driver_root}/version")
    except OSError as fault:
        kind = os_error_kind(fault, BROKEN)
        raise Refusal(kind, f"driver version: {fault}", "load the driver") from fault
    for word in text.partition("\n")[0].split():
        if word[:1].isdigit() and "." in word and word.replace(".", "").isdigit():
            return word
    raise Refusal(BROKEN, f"no driver version in {text[:60]!r}", "look at the driver")


def user_bind_lists(environ: "Mapping[str, str]") -> list[tuple[str, str]]:
    """Return each bind list by name, as the user's containers would take it without ours.

    Apptainer reads SINGULARITY_BINDPATH only where APPTAINER_BINDPATH is not set.
    """
    apptainer, singularity = [environ.get(name, "") for name in BIND_LISTS]
    return [(BIND_LISTS[0], apptainer or singularity), (BIND_LISTS[1], singularity)]


def append_binds(old: str, binds: str) -> str:
    """Return a bind list with ours at its end, once, and none of another driver's.

    A job that was submitted from a job brings what that one's node bound, and of two binds on one
    place Apptainer takes the first. A bind of the user's own onto /nvlib stands.
    """
    ours = {_bind_without_version(bind) for bind in binds.split(",")}
    own = [bind for bind in old.split(",") if bind and _bind_without_version(bind) not in ours]
    return ",".join([*own, binds])


def _bind_without_version(bind: str) -> tuple[str, str, str]:
    source, _, target = bind.partition(":")
    parts = source.rsplit("/", 2)
    return parts[0], parts[-1], target
