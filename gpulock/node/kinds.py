# SPDX-License-Identifier: Apache-2.0
"""Of what kind a device is, and which kinds a request may name. Pure.

Hot, loaded where a kind is asked for or a node has devices of several. A device is a whole card of
a model (`a100-sxm4-80gb`) or an instance of a MIG profile (`3g.40gb`). A request names one of
`model:NAME`, `mig:PROFILE`, `share`, `card` (whole cards, several of one model), `mixed` (whole
cards of any models) or `any` (instances too). One `*` in a name stands for anything. What is not
known is matched by no `model:` or `mig:`.
"""

from gpulock.node.devices import Device

MODEL, MIG, SHARE_KIND = "model:", "mig:", "share"
CARD, MIXED, ANY = "card", "mixed", "any"  # what PLAIN_REQUEST may be
MAKERS = ("nvidia", "tesla", "geforce", "quadro")
NOT_MODEL = ("generation", "graphics")
PUNCTUATION = str.maketrans("", "", ".-+_*")


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
    if text in (SHARE_KIND, CARD, MIXED, ANY):
        return text
    start, colon, name = text.partition(":")
    start, name = start + colon, name.lower()
    if start == MODEL and "*" not in name:
        name = model_slug(name.replace("-", "_"))
    plain = name.translate(PUNCTUATION)
    named = name == "*" or (plain.isascii() and plain.isalnum() and name.count("*") <= 1)
    if named and (start == MODEL or (start == MIG and is_mig_profile(name))):
        return start + name
    raise ValueError(
        f"must be model:NAME, mig:PROFILE as in mig:3g.40gb, share, card, mixed or any,"
        f" not {text!r}"
    )


def is_mig_profile(name: str) -> bool:
    """Return whether a word is a MIG profile, as `3g.40gb` or `1g.*`, or `*`."""
    return name == "*" or (name[:1].isdigit() and "g." in name)


def is_of_kind(device: Device, kind: str) -> bool:
    """Return whether a device may be granted to a request of a kind."""
    if kind == ANY:
        return True
    if kind in (CARD, MIXED):
        return not device.parent
    start, colon, pattern = kind.partition(":")
    return start + colon == (MIG if device.parent else MODEL) and matches_pattern(
        device_kind(device), pattern
    )


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a name is what a pattern says, in which one `*` stands for anything."""
    first, star, last = pattern.partition("*")
    if not (name and star):
        return name == pattern
    longest = len(name) >= len(first) + len(last)
    return longest and name.startswith(first) and name.endswith(last)


def count_device_kinds(devices: list[Device]) -> dict[str, int]:
    """Return how many devices of each kind there are, as a request names it; unknown ones `?`."""
    counts: dict[str, int] = {}
    for device in devices:
        kind = (MIG if device.parent else MODEL) + (device_kind(device) or "?")
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def format_device_kinds(devices: list[Device], shares: tuple[str, ...] = ()) -> str:
    """Return what there is: `a100-sxm4-80gb (6), 3g.40gb (2), share (8)`; `shares` are SHARES."""
    counts = count_device_kinds(devices)
    if shares:
        from gpulock.node.shares import count_places_by_card

        places = sum(count_places_by_card(devices, shares).values())
        counts |= {SHARE_KIND: places} if places else {}
    return (
        ", ".join([f"{kind.partition(':')[2] or kind} ({n})" for kind, n in counts.items()])
        or "no GPU"
    )


def parse_sge_complexes(text: str) -> dict[str, str]:
    """Return the kind of each complex in `gpu gpu_a100=model:a100*`, empty where none is said.

    Raises ValueError.
    """
    kinds: dict[str, str] = {}
    for word in text.split():
        name, equals, kind = word.partition("=")
        if name in kinds or not name:
            raise ValueError(f"must name each complex once, not {text!r}")
        kinds[name] = parse_kind(kind) if equals else ""
    return kinds
