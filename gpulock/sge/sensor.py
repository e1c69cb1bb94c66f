# SPDX-License-Identifier: Apache-2.0
"""The load sensor of Grid Engine: what this host really has, for qhost -F and the scheduler.

execd starts it as root, writes a line when it wants a report and "quit" at the end (sge_conf(5),
load_sensor). The consumable itself is reported as well: qmaster takes the smaller of its own
bookkeeping and the sensor's value, so while something is bad (a stale or foreign lock, a card
quarantined or gone) no job is sent where the prolog would have to send it back.
"""

import os
import sys

from gpulock import deadline
from gpulock.alloc import states
from gpulock.alloc.node_view import read_node_view
from gpulock.alloc.states import DeviceState
from gpulock.errors import BROKEN, UNKNOWN, Refusal
from gpulock.node.context import Node
from gpulock.node.settings import KEYS, read_settings
from gpulock.sge import hook

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

STALE_STATES = (states.STALE, states.NOT_KNOWN)
OUT_STATES = (states.QUARANTINED, states.MISSING)


def main(config: str, source: "TextIO | None" = None, sink: "TextIO | None" = None) -> int:
    """Answer each line of `source` with a report; return at "quit" or at its end."""
    lines, answers = source or sys.stdin, sink or sys.stdout
    for line in iter(lines.readline, ""):
        if line.strip() == "quit":
            break
        for answer in ["begin", *sensor_report_lines(config), "end"]:
            answers.write(answer + "\n")
        answers.flush()
    return 0


def sensor_report_lines(config: str) -> list[str]:
    """Return the values of this host as `host:complex:value`; a node in doubt offers nothing."""
    try:
        node = Node(read_settings(config))
    except Refusal:
        names = next(k[2].split() for k in KEYS if k[0] == "SGE_COMPLEXES")
        return zero_sensor_lines(os.uname().nodename, tuple(names))
    try:
        found = read_sensor_rows(node)
    except Exception:  # the one broad handler: a host in doubt offers nothing
        return zero_sensor_lines(node.name, node.settings.sge_complexes)
    values = compute_sensor_values(found, node.settings.sge_complexes)
    return [f"{node.name}:{name}:{value}" for name, value in values.items()]


def zero_sensor_lines(host: str, complexes: tuple[str, ...]) -> list[str]:
    """Return the values of a host that offers nothing: what is not reported is not limited."""
    return [f"{host}:{name}:0" for name in (*complexes, "gpu.free")]


def read_sensor_rows(node: Node) -> list[DeviceState]:
    """Return the state of every device, judged afresh where no daemon keeps verdicts."""
    devices = node.devices()
    if not os.path.isdir(node.settings.state_dir):
        raise Refusal(BROKEN, "STATE_DIR is missing", "no claim is granted without")
    view = read_node_view(node, deadline.clock_boottime())
    if view.lost:
        raise Refusal(UNKNOWN, "the locks of this boot were lost", "run gpulock reap")
    if view.verdicts is None:
        judge = hook.make_sge_judge(node)
        view.verdicts = {
            lock.owner.token: judge.verdict(lock) for lock in view.held.values() if lock.owner
        }
    return view.device_rows(devices, node.settings.expected_gpus)


def compute_sensor_values(found: list[DeviceState], complexes: tuple[str, ...]) -> dict[str, int]:
    """Return the value of each complex. Pure."""
    free = len([row for row in found if row.state == states.FREE])
    offered = len(found) if all(map(is_offered_row, found)) else free
    counted = {
        "gpu.free": free,
        "gpu.held": len([r for r in found if r.state in (states.HELD, states.HELD_IDLE)]),
        "gpu.stale": len([r for r in found if r.state in STALE_STATES]),
        "gpu.quarantined": len([r for r in found if r.state in OUT_STATES]),
    }
    return {**dict.fromkeys(complexes, offered), **counted}


def is_offered_row(row: DeviceState) -> bool:
    """Return whether qmaster may offer a device: it is free, or a job of its own runs on it."""
    record = row.lock.owner if row.lock else None
    if row.state not in (states.HELD, states.HELD_IDLE):
        return row.state == states.FREE
    return record is not None and record.scheduler == "sge" and not record.draining
