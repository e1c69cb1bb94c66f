# SPDX-License-Identifier: Apache-2.0
"""How times, devices and owners are said and read; pure."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from gpulock.node.devices import SHARE, Device
from gpulock.store.owner import Owner

MINUTE, HOUR, DAY = 60, 3600, 86400
GIB = 1 << 30
PERCENT = 100
HALF = 0.5  # percent: what is below is not 0
UNITS = {"s": 1, "m": MINUTE, "h": HOUR, "d": DAY}
FORCE = 'gpulock release {} --force --reason "TEXT"'
MAKERS = re.compile(r"^(NVIDIA |Tesla |GeForce |Quadro (?=RTX))+| (Generation|Graphics)$")


def parse_duration(text: str) -> float:
    """Return the seconds of `90`, `90s`, `30m`, `1h`, `1h30m`, `2d`; raise ValueError."""
    if text.isascii() and text.isdigit():
        return float(text)
    parts = re.findall(r"([0-9]+)([smhd])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is no duration: 90s, 30m, 1h, 1h30m or 2d")
    return float(sum(int(number) * UNITS[unit] for number, unit in parts))


def format_duration(seconds: float) -> str:
    """Return `37s`, `12m`, `4h12m` or `2d03h`, which `parse_duration` reads as well."""
    whole = max(0, int(seconds))
    if whole < MINUTE:
        return f"{whole}s"
    if whole < HOUR:
        return f"{whole // MINUTE}m"
    if whole < DAY:
        return f"{whole // HOUR}h{whole % HOUR // MINUTE:02}m"
    return f"{whole // DAY}d{whole % DAY // HOUR:02}h"


def held_seconds(record: Owner, boot_id: str, boottime: float, now: float) -> float:
    """Return how long a claim stands; by the wall clock where it is of another boot."""
    if record.boot_id == boot_id:
        return max(0.0, boottime - record.claimed_boottime)
    return max(0.0, now - record.claimed_at)


def format_local_time(epoch: float) -> str:
    """Return a point in time as people write it, in their zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(epoch))


def format_percent(share: float | None) -> str:
    """Return `61 %`; `<1 %` is not nothing, `99 %` not everything, `-` not known."""
    if share is None:
        return "-"
    value = share * PERCENT
    if 0 < value < HALF:
        return "<1 %"
    if PERCENT - HALF <= value < PERCENT - 1e-9:
        return "99 %"
    return f"{value:.0f} %"


def short_model(model: str) -> str:
    """Return `V100-SXM2-32GB` of `Tesla V100-SXM2-32GB`: what tells one card from another."""
    return MAKERS.sub("", model.strip()) or model


def format_device_label(name: str, devices: Iterable[Device]) -> str:
    """Return `GPU 3` for a lock id, a share's too; the id where the driver does not show it."""
    card = name.partition(SHARE)[0]
    return next((f"GPU {one.label()}" for one in devices if one.id == card), name)


def name_devices(text: str, devices: Iterable[Device], word: str = "GPU ") -> str:
    """Return a text with the number of each device in the place of its id."""
    for one in sorted(devices, key=lambda one: len(one.id), reverse=True):  # instances first
        text = text.replace(one.id, f"{word}{one.label()}")
    return text


def format_device_list(ids: Iterable[str], devices: list[Device]) -> str:
    """Return `GPU 3` or `GPUs 0, 3` for lock ids, in the order of the node."""
    wanted = [name.partition(SHARE)[0] for name in ids]
    known = [device.label() for device in devices if device.id in wanted]
    gone = [name for name in wanted if name not in {device.id for device in devices}]
    names = [*known, *gone]
    return f"GPU{'s' if len(names) != 1 else ''} {', '.join(names) or 'none'}"


def format_lock_holder(record: Owner) -> str:
    """Return who holds a lock: `job 12.3 of alice`, `pid 4711 of bob`, `a reserve of root`."""
    if record.scheduler == "admin":
        return f"a reserve of {record.user}"
    if record.scheduler == "process":
        return f"pid {record.job_id} of {record.user}"
    return f"job {record.job()} of {record.user}"


def format_count(number: int, thing: str) -> str:
    """Return `1 GPU`, `2 GPUs`, `1 process`, `2 processes`."""
    plural = f"{thing}es" if thing.endswith("s") else f"{thing}s"
    return f"{number} {thing if number == 1 else plural}"
