# SPDX-License-Identifier: Apache-2.0
"""Which devices, or how many, a Slurm job gets on this node: from what its user cannot forge.

Hot. Where Slurm chooses, the positions it gives. Where gpulock chooses, the number of them
(gres.conf with Flags=no_gpu_env).
"""

from gpulock.errors import INVALID_REQUEST, Refusal
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.slurm.call import SlurmHookCall
from gpulock.slurm.gres_map import needs_gres_map, read_shared_gres, resolve_gres_devices

SHARD = "shard"  # the one GRES of which several jobs may share a card


def slurm_selects_devices(settings: Settings) -> bool:
    """Return whether Slurm says which devices."""
    return settings.slurm_device_selection == "slurm"


def asks_for_share(call: SlurmHookCall, settings: Settings) -> bool:
    """Return whether a job shares its cards; raise Refusal(INVALID_REQUEST) where it may not.

    slurmd tells of gres/shard what it tells of a whole card (docs/facts/slurm.md, shared devices).
    So slurmctld is asked, on a node that has such a GRES. Where it is silent, or its answer may be
    cut off, the job counts as one of whole cards: it shares with nobody.
    """
    if call.mps:
        raise part_of_gpu_refusal("mps")
    shared = read_shared_gres(settings.state_dir)
    if not shared or (call.gpus is None and len(shared) == 1):
        return False  # of two such GRES slurmd tells neither's cards
    from gpulock.slurm.scontrol import (
        REQUESTS,
        SlurmctldClient,
        SlurmctldSilentError,
        is_request_cut_off,
    )

    try:
        answer = SlurmctldClient(settings, call.conf).job(call.job) or {}
    except SlurmctldSilentError:
        return False
    texts = [answer.get(key, "") for key in REQUESTS]
    names = [name for text in texts for name in requested_gres_names(text)]
    parts = [name for name in names if name in shared]
    if not parts:
        return False
    share = settings.slurm_shards == "share" and slurm_selects_devices(settings)
    if set(parts) != {SHARD} or not share or "gpu" in names or call.gpus is None:
        raise part_of_gpu_refusal(parts[0])
    return not any([is_request_cut_off(text) for text in texts])


def part_of_gpu_refusal(name: str) -> Refusal:
    """Return the refusal of a job that asks for a part of a GPU."""
    why = f"the job asks for a part of a GPU (gres/{name}), which this node does not give"
    return Refusal(INVALID_REQUEST, why, "ask for whole ones: --gres=gpu:1")


def count_gres_kinds(call: SlurmHookCall, node: Node) -> tuple[tuple[str, int], ...]:
    """Return the kinds (gpulock.node.kinds) of the positions that Slurm has counted; raise Refusal.

    Devices of the same kinds are taken, by the map. Empty where Slurm chooses, or on a node of one
    model, which needs no map.
    """
    if slurm_selects_devices(node.settings):
        return ()
    devices = node.devices()
    if not needs_gres_map(devices, node.settings):
        return ()
    from gpulock.node.kinds import count_device_kinds

    counted = resolve_gres_devices(node.settings.state_dir, call.positions(), devices)
    return tuple(count_device_kinds(counted).items())


def list_slurm_device_ids(call: SlurmHookCall, node: Node) -> tuple[str, ...]:
    """Return the ids of the devices that Slurm chose, none where gpulock is to choose."""
    if not slurm_selects_devices(node.settings):
        return ()
    chosen = resolve_gres_devices(node.settings.state_dir, call.positions(), node.devices())
    return tuple([d.id for d in chosen])


def split_gres_entry(entry: str) -> list[str]:
    """Return the words of one entry, its name first: none of `gres:` alone."""
    words = entry.strip().replace("gres/", "gres:").replace("=", ":").split(":")
    return words[1:] if words[0] == "gres" else words


def requested_gres_names(text: str) -> list[str]:
    """Return the names in a request like `gres:gpu:2,gres:shard:1`."""
    return [words[0] for entry in text.split(",") if "".join(words := split_gres_entry(entry))]
