# SPDX-License-Identifier: Apache-2.0
"""Which devices, or how many, a Slurm job gets on this node: from what its user cannot forge.

Hot. Where Slurm chooses, the positions it gives. Where gpulock chooses, the number of them
(gres.conf with Flags=no_gpu_env); of a GRES that is only counted, slurmctld's own word.
"""

from gpulock.errors import INVALID_REQUEST, UNKNOWN, Refusal, one_line, shorten
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.slurm.call import SlurmHookCall, is_slurm_number
from gpulock.slurm.gres_map import needs_gres_map, read_shared_gres, resolve_gres_devices

SHARD = "shard"  # the one GRES of which several jobs may share a card
MOST = 999  # devices: more than any node has


def slurm_selects_devices(settings: Settings) -> bool:
    """Return whether Slurm says which devices."""
    return settings.slurm_device_selection == "slurm"


def uses_slurm_job_gpus(settings: Settings) -> bool:
    """Return whether SLURM_JOB_GPUS is what is believed."""
    return slurm_selects_devices(settings) or settings.slurm_count == "gpus"


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
        found = SlurmctldClient(settings, call.conf).job(call.job) or {}
    except SlurmctldSilentError:
        return False
    texts = [found.get(key, "") for key in REQUESTS]
    names = [name for text in texts for name in requested_gres_names(text)]
    parts = [name for name in names if name in shared]
    if not parts:
        return False
    share = settings.slurm_shards == "share" and slurm_selects_devices(settings)
    whole = [name for name in names if name in ("gpu", *settings.slurm_gres)]
    if set(parts) != {SHARD} or not share or whole or call.gpus is None:
        raise part_of_gpu_refusal(parts[0])
    return not any([is_request_cut_off(text) for text in texts])


def part_of_gpu_refusal(name: str) -> Refusal:
    """Return the refusal of a job that asks for a part of a GPU."""
    why = f"the job asks for a part of a GPU (gres/{name}), which this node does not give"
    return Refusal(INVALID_REQUEST, why, "ask for whole ones: --gres=gpu:1")


def list_slurm_job_gres(call: SlurmHookCall, settings: Settings) -> list[tuple[str, int]]:
    """Return (type, number) of what the job asked for on this node; raise Refusal.

    The type is empty where none is said, or Slurm tells positions.
    """
    if uses_slurm_job_gpus(settings):
        return [("", len(call.positions()))]
    from gpulock.slurm.scontrol import REQUESTS, SlurmctldClient, is_request_cut_off

    found = SlurmctldClient(settings, call.conf).job(call.job)
    if found is None:
        raise Refusal(UNKNOWN, f"slurmctld knows no job {call.job}", "nothing to do")
    for key in REQUESTS:
        text = found[key]
        if is_request_cut_off(text):
            raise invalid_gres_request(text, "is too long, its end is not seen")
        if key != "Gres" and text != "N/A" and any([name in text for name in settings.slurm_gres]):
            raise invalid_gres_request(text, "is not per node")
    return parse_gres_request("" if found["Gres"] == "N/A" else found["Gres"], settings.slurm_gres)


def resolve_gres_kinds(
    call: SlurmHookCall, node: Node, asked: list[tuple[str, int]]
) -> tuple[tuple[str, int], ...]:
    """Return the kinds (gpulock.node.kinds) that the types of a request mean; raise Refusal.

    None where Slurm chooses, or all is plain. Of positions that Slurm has counted for the job
    devices of the same kinds are taken, by the map; a node of one model needs none.
    """
    settings = node.settings
    if slurm_selects_devices(settings):
        return ()
    from gpulock.node.kinds import count_device_kinds, gres_type_kind

    if settings.slurm_count != "gpus":
        if not any([name for name, _ in asked]):
            return ()
        found = node.devices()
        try:
            return tuple(
                [(gres_type_kind(found, name) if name else "", n) for name, n in asked if n]
            )
        except ValueError as fault:
            raise invalid_gres_request(",".join([name for name, _ in asked]), str(fault)) from fault
    found = node.devices()
    if not needs_gres_map(found, settings):
        return ()
    counted = resolve_gres_devices(settings.state_dir, call.positions(), found)
    return tuple(count_device_kinds(counted).items())


def list_slurm_device_ids(call: SlurmHookCall, node: Node) -> tuple[str, ...]:
    """Return the ids of the devices that Slurm chose, none where gpulock is to choose."""
    if not slurm_selects_devices(node.settings):
        return ()
    chosen = resolve_gres_devices(node.settings.state_dir, call.positions(), node.devices())
    return tuple([d.id for d in chosen])


def parse_gres_request(text: str, names: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return (type, number) of the devices in `gres:gpux:2,gres:nvme:1` (per node).

    Raises Refusal(INVALID_REQUEST).

    `gres:` or `gres/` may stand before a name, a type behind it; no number means one. Of one that
    is named twice Slurm charges the last alone, so it is refused, as is what is neither a type
    nor a number: the text is the user's.
    """
    found: list[tuple[str, int]] = []
    kinds: list[tuple[str, str]] = []
    for entry in text.split(",") if text else ():
        words = split_gres_entry(entry)
        if not words or not words[0]:
            raise invalid_gres_request(text, "cannot be read")
        if words[0] in names:
            kind, number = parse_gres_entry(words[1:], text)
            kinds.append((words[0], kind))
            found.append((kind, number))
    for name, kind in kinds:
        if kinds.count((name, kind)) > 1 or (kind and (name, "") in kinds):
            raise invalid_gres_request(text, f"names {name} twice")
    return found


def split_gres_entry(entry: str) -> list[str]:
    """Return the words of one entry, its name first: none of `gres:` alone."""
    words = entry.strip().replace("gres/", "gres:").replace("=", ":").split(":")
    return words[1:] if words[0] == "gres" else words


def requested_gres_names(text: str) -> list[str]:
    """Return the names in a request like `gres:gpu:2,gres:shard:1`."""
    return [words[0] for entry in text.split(",") if "".join(words := split_gres_entry(entry))]


def parse_gres_entry(words: list[str], text: str) -> tuple[str, int]:
    """Return (type, number) in what follows a name: nothing, either of them, or both."""
    *kinds, last = words or ["1"]
    if is_gres_type(last) and not kinds:
        return last, 1
    if len(kinds) > 1 or not all([is_gres_type(kind) for kind in kinds]):
        raise invalid_gres_request(text, "cannot be read")
    digits = last.strip().removeprefix("+")  # as strtoull(3) takes it
    if not is_slurm_number(digits) or int(digits) > MOST:
        raise invalid_gres_request(text, "cannot be read")
    return kinds[0] if kinds else "", int(digits)


def is_gres_type(word: str) -> bool:
    """Return whether a word is a type, as `a100` or `1g.10gb+me`: it has a letter, no count has."""
    bare = word.replace(".", "").replace("-", "").replace("_", "").replace("+", "")
    return word[:1].isalnum() and bare.isalnum() and not bare.isdigit()


def invalid_gres_request(text: str, why: str) -> Refusal:
    """Return the refusal of a request that its user must change."""
    do = "ask as in --gres=gpu:2, each kind once"
    return Refusal(INVALID_REQUEST, f"the request {shorten(one_line(text))!r} {why}", do)
