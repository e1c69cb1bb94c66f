# SPDX-License-Identifier: Apache-2.0
"""Of what kind a device is, and which kinds a request may name. Pure.

Hot, loaded where a kind is asked for or a node has devices of several. A device is a whole card of
a model (`a100-sxm4-80gb`) or an instance of a MIG profile (`3g.40gb`). A request names one of
`model:PATTERN`, `mig:PROFILE`, `share`, `card` (whole cards, several of one model), `mixed` (whole
cards of any models) or `any` (instances too). What is not known is matched by no `model:` or
`mig:`.
"""

from gpulock.node.devices import Device

MODEL, MIG, SHARE_KIND = "model:", "mig:", "share"
CARD, MIXED, ANY = "card", "mixed", "any"  # what PLAIN_REQUEST may be
MAKERS = ("nvidia", "tesla", "geforce", "quadro")
NOT_MODEL = ("generation", "graphics")
EXACTLY = "="  # before a name that exact_kind found to be whole; no request is written so


def model_slug(model: str) -> str:
    """Return `a100-sxm4-80gb` of `NVIDIA A100-SXM4-80GB`: how a request writes it."""
    words = model.lower().replace("_", " ").split()
    while len(words) > 1 and words[0] in MAKERS:
        del words[0]
    if len(words) > 1 and words[-1] in NOT_MODEL:
        del words[-1]
    return "-".join(words)


def device_kind(device: Device) -> str:
    """Return the MIG profile of an instance, the model of a card; empty where it is not known."""
    return device.profile.lower() if device.parent else model_slug(device.model)


def parse_kind(text: str) -> str:
    """Return a kind as it is compared; raise ValueError for what is none."""
    for start in (MODEL, MIG):
        if text.startswith(start):
            name = text[len(start) :].lower()
            if start == MODEL:
                name = model_slug(name.replace("-", "_")) if "*" not in name else name
            bare = name
            for mark in ".-+*_":
                bare = bare.replace(mark, "")
            if not (bare.isascii() and bare.isalnum()) and name != "*":
                break
            if start == MIG and not is_mig_profile(name):
                break
            return start + name
    if text not in (SHARE_KIND, CARD, MIXED, ANY):
        raise ValueError(
            f"must be model:NAME, mig:PROFILE as in mig:3g.40gb, share, card, mixed or any,"
            f" not {text!r}"
        )
    return text


def is_mig_profile(name: str) -> bool:
    """Return whether a word is a MIG profile, as `3g.40gb` or `1g.*`, or `*`."""
    return name == "*" or (name[:1].isdigit() and "g." in name)


def gres_type_kind(word: str) -> str:
    """Return the kind that a type of Slurm's GRES means (`a100`, `3g.40gb`, `share`).

    Raises ValueError.
    """
    name = word.lower()
    if name == SHARE_KIND:
        return name
    return parse_kind((MIG if is_mig_profile(name) else MODEL) + name)


def exact_kind(found: list[Device], kind: str) -> str:
    """Return a kind as a node of these devices means it: a whole name is no part of another.

    So `h200` is an H200 where there is one, and no H200 NVL.
    """
    start, _, name = kind.partition(":")
    whole = f"{start}:" == MODEL and name in [model_slug(d.model) for d in found if not d.parent]
    return f"{MODEL}{EXACTLY}{name}" if whole else kind


def is_of_kind(device: Device, kind: str) -> bool:
    """Return whether a device may be granted to a request of a kind; see exact_kind."""
    if kind == ANY:
        return True
    if kind.startswith(MIG):
        return bool(device.parent and device.profile) and matches_pattern(
            device.profile.lower(), kind[len(MIG) :]
        )
    if device.parent:
        return False
    if not kind.startswith(MODEL):
        return kind in (CARD, MIXED)
    name, pattern = model_slug(device.model), kind[len(MODEL) :]
    if pattern.startswith(EXACTLY):
        return name == pattern[len(EXACTLY) :]
    if "*" in pattern:
        return bool(name) and matches_pattern(name, pattern)
    return f"-{pattern}-" in f"-{name}-"  # `a10` is not of `a100-sxm4-80gb`


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a name is what a pattern says, in which `*` stands for anything."""
    first, *rest = pattern.split("*")
    if not rest:
        return name == pattern
    last = rest.pop()
    if not name.startswith(first) or len(name) < len(first) + len(last):
        return False
    at, end = len(first), len(name) - len(last)
    for part in rest:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return name.endswith(last)


def count_device_kinds(found: list[Device]) -> dict[str, int]:
    """Return how many devices of each kind there are, `?` for those that are not known."""
    counts: dict[str, int] = {}
    for device in found:
        kind = device_kind(device) or "?"
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def count_requestable_kinds(found: list[Device]) -> dict[str, int]:
    """Return how many devices of each kind there are, as a request names it; unknown ones too."""
    counts: dict[str, int] = {}
    for device in found:
        kind = (MIG if device.parent else MODEL) + (device_kind(device) or "?")
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def format_device_kinds(found: list[Device], shares: tuple[str, ...] = ()) -> str:
    """Return what there is: `a100-sxm4-80gb (6), 3g.40gb (2), share (8)`; `shares` are SHARES."""
    counts = count_device_kinds(found)
    if shares:
        from gpulock.node.shares import count_places_by_card

        places = sum(count_places_by_card(found, shares).values())
        counts |= {SHARE_KIND: places} if places else {}
    return ", ".join([f"{kind} ({count})" for kind, count in counts.items()]) or "no GPU"


def parse_sge_complexes(text: str) -> dict[str, str]:
    """Return the kind of each complex in `gpu gpu_a100=model:a100*`, empty where none is said.

    Raises ValueError.
    """
    found: dict[str, str] = {}
    for word in text.split():
        name, equals, kind = word.partition("=")
        if name in found or not name:
            raise ValueError(f"must name each complex once, not {text!r}")
        found[name] = parse_kind(kind) if equals else ""
    return found
