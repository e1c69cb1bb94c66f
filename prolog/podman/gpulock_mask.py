#!/usr/bin/python3 -IS
# SPDX-License-Identifier: Apache-2.0
"""A precreate hook of podman: a container in a job has the job's mask (docs/containers.md).

podman passes no variable of the job to a container, and the image's own would stand. It gives the
container's config.json on stdin and takes it back from stdout. This runs as the user, in the job,
as a child of podman, which has the job's environment. What fails starts no container.
"""

import json
import os
import sys
from typing import Any, Final

MASK: Final = "CUDA_VISIBLE_DEVICES"
NVIDIA: Final = "NVIDIA_VISIBLE_DEVICES"
OWN: Final = "GPULOCK_DEVICES"  # the UUIDs: they mean the same wherever GPUs are counted anew
NONE: Final = "void"
MPS: Final = (  # of a share with SHARE_MPS, or of an MPS of the user's
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
)


def split_pairs(pairs: list[str]) -> dict[str, str]:
    """Return NAME=VALUE texts by name; pure."""
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def container_mask(job: dict[str, str], own: dict[str, str]) -> dict[str, str]:
    """Return what a container lacks of the job's mask, by the environments of both; pure.

    The mask of CUDA may be a share that the user chose (`--env`). NVIDIA's is never more than the
    job's; `void` is a spec's, which gives the devices itself.
    """
    if MASK not in job:
        return {}  # no job of gpulock's
    uuids = job.get(OWN)
    if uuids is None:  # a task of which no device can be told
        return {NVIDIA: NONE}
    found: dict[str, str] = {OWN: uuids}
    found.update({name: job[name] for name in MPS if name in job and name not in own})
    if MASK not in own:
        found[MASK] = uuids
    asked = own.get(NVIDIA) or "all"
    if asked != NONE and not {*asked.split(",")} <= {*uuids.split(",")}:
        found[NVIDIA] = uuids or NONE
    return found


def add_job_mask(config: dict[str, Any], job: dict[str, str]) -> None:
    """Put the mask into a container's config.json."""
    pairs: list[str] = config["process"].setdefault("env", [])
    added = container_mask(job, split_pairs(pairs))
    kept = [pair for pair in pairs if pair.partition("=")[0] not in added]
    config["process"]["env"] = [*kept, *(f"{name}={value}" for name, value in added.items())]


def main() -> None:
    """Answer podman."""
    config = json.load(sys.stdin)
    with open(f"/proc/{os.getppid()}/environ", encoding="utf-8", errors="replace") as file:
        job = split_pairs(file.read().split("\0"))
    add_job_mask(config, job)
    json.dump(config, sys.stdout)


if __name__ == "__main__":
    main()
