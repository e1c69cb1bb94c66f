# SPDX-License-Identifier: Apache-2.0
"""A card that the driver does not show, asked for by its bus id."""

from __future__ import annotations

from gpulock.alloc.states import MISSING, DeviceState
from gpulock.cli.select import DEVICE, match_devices, parse_lock_id
from gpulock.cli.status.status_view import StatusView
from gpulock.cli.why.evidence import describe_health_steps, last_holder_facts


def find_missing_card(view: StatusView, rows: list[DeviceState], text: str) -> DeviceState | None:
    """Return the row of the card that `text` names, None for one that is here or never was."""
    prefixed = DEVICE.fullmatch(text.strip())
    name = (prefixed[1] if prefixed else text.strip()).lower()
    place = parse_lock_id(name)
    if place is None or match_devices(name, view.devices):
        return None
    bus, dot, instance = place
    name = f"{bus}{dot}{instance}"
    absent = [row for row in rows if row.device is None]
    for row in absent:
        if row.id == name:
            return row
    reasons = ["the driver does not show it"]
    if view.use.sample and bus in view.use.sample.lost:
        reasons.append(view.use.sample.lost[bus][1])
    if note := (view.quarantined or {}).get(name):
        reasons.append(f"quarantined: {note}")
    known = any(row.lock is None for row in absent) or len(reasons) > 1
    if known or describe_health_steps(view, name) or last_holder_facts(view, name):
        return DeviceState(name, None, None, MISSING, "; ".join(reasons))
    return None
