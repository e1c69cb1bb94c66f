# SPDX-License-Identifier: Apache-2.0
"""Which devices, or how many, a Slurm job gets on this node: from what its user cannot forge.

Hot. Where Slurm chooses, the positions it gives. Where gpulock chooses, the number of them
(gres.conf with Flags=no_gpu_env); of a GRES that is only counted, the comment that the site's
job_submit wrote, or slurmctld's own word.
"""

from gpulock.node import Node
from gpulock.refusal import UNKNOWN, Refusal, one_line
from gpulock.settings import Settings
from gpulock.slurm.call import Call, is_number

MOST = 999  # devices: more than any node has


def is_picked_by_slurm(settings: Settings) -> bool:
    """Return whether Slurm says which devices."""
    return settings.slurm_chooser == "slurm"


def is_counted_by_position(settings: Settings) -> bool:
    """Return whether SLURM_JOB_GPUS is what is believed."""
    return is_picked_by_slurm(settings) or settings.slurm_count == "gpus"


def count(call: Call, settings: Settings) -> int:
    """Return how many devices the job asked for on this node; raise Refusal(UNKNOWN)."""
    if is_counted_by_position(settings):
        return len(call.positions())
    if settings.slurm_count == "comment":
        return in_gres(call.comment, settings.slurm_gres)
    from gpulock.slurm.scontrol import Control

    found = Control(settings, call.conf).job(call.job)
    if found is None:
        raise Refusal(UNKNOWN, f"slurmctld knows no job {call.job}", "nothing to do")
    return in_gres("" if found["Gres"] == "N/A" else found["Gres"], settings.slurm_gres)


def wanted(call: Call, node: Node) -> tuple[str, ...]:
    """Return the ids of the devices that Slurm chose, none where gpulock is to choose."""
    if not is_picked_by_slurm(node.settings):
        return ()
    from gpulock.slurm.gres_map import devices_at

    chosen = devices_at(node.settings.state_dir, call.positions(), node.devices())
    return tuple([d.id for d in chosen])


def in_gres(text: str, names: tuple[str, ...]) -> int:
    """Return the devices in `gres:gpux:2,gres:nvme:1` (per node); raise Refusal(UNKNOWN).

    `gres:` or `gres/` may stand before a name, a type behind it; no number means one. What is
    neither a type nor a number is refused, never read as one.
    """
    total = 0
    for entry in text.split(",") if text else ():
        words = entry.strip().replace("gres/", "gres:").replace("=", ":").split(":")
        if words[0] == "gres":
            words = words[1:]
        if not words or not words[0]:
            raise unreadable(text)
        if words[0] in names:
            total += one(words[1:], text)
    return total


def one(words: list[str], text: str) -> int:
    """Return the number in what follows a name: nothing, a type, a number, or both."""
    *kinds, last = words or ["1"]
    if is_type(last) and not kinds:
        return 1
    if len(kinds) > 1 or not all([is_type(kind) for kind in kinds]):
        raise unreadable(text)
    if not is_number(last) or int(last) > MOST:
        raise unreadable(text)
    return int(last)


def is_type(word: str) -> bool:
    """Return whether a word is a type, as `a100` or `1g.5gb`: it has a letter, a count has none."""
    bare = word.replace(".", "").replace("-", "").replace("_", "")
    return word[:1].isalnum() and bare.isalnum() and not bare.isdigit()


def unreadable(text: str) -> Refusal:
    """Return the refusal for a request that cannot be read."""
    return Refusal(
        UNKNOWN, f"the request {one_line(text)[:80]!r} cannot be read", "see docs/slurm.md"
    )
