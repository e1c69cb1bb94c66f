# SPDX-License-Identifier: Apache-2.0
"""The load sensor of Grid Engine: what this host really has, for qhost -F and the scheduler.

execd starts it as root, writes a line when it wants a report and "quit" at the end (sge_conf(5),
load_sensor). A value counts under execd's own name for the host alone, which is in HOST: the node's
may lack the domain. The consumable itself is reported as well: qmaster takes the smaller of its own
bookkeeping and the sensor's value, so while something is bad (a stale or foreign lock, a card
quarantined or gone) no job is sent where the prolog would have to send it back.
"""

import os
import sys

from gpulock import deadline
from gpulock.alloc import states
from gpulock.alloc.node_view import read_node_view
from gpulock.alloc.states import DeviceState
from gpulock.errors import LINE_BYTES, UNKNOWN, Refusal, shorten
from gpulock.node.context import Node
from gpulock.node.devices import SHARE, Device
from gpulock.node.kinds import SHARE_KIND, is_of_kind
from gpulock.node.settings import Settings
from gpulock.node.settings_file import read_settings
from gpulock.sge.verdict import make_sge_judge
from gpulock.store.event_kinds import OPEN
from gpulock.store.event_log import is_gate_in_doubt
from gpulock.store.events import note_event
from gpulock.store.gate import Gate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

GATE_PATIENCE = 0.5  # seconds; execd waits for the report of all its sensors
OUT_STATES = (states.QUARANTINED, states.MISSING)


def main(environ: "Mapping[str, str]", config: str) -> int:
    """Answer each line of standard input with a report; return at "quit" or at its end."""
    host = environ.get("HOST") or os.uname().nodename
    for line in iter(sys.stdin.readline, ""):
        if line.strip() == "quit":
            break
        for answer in ["begin", *sensor_report_lines(config, host), "end"]:
            sys.stdout.write(shorten(answer, LINE_BYTES) + "\n")
        sys.stdout.flush()
    return 0


def sensor_report_lines(config: str, host: str) -> list[str]:
    """Return the values of this host as `host:complex:value`; a node in doubt offers nothing."""
    try:
        node = Node(read_settings(config))
    except Refusal:
        return zero_sensor_lines(host, Settings({}).sge_complexes)
    try:
        rows = read_sensor_rows(node)
    except Exception:  # the one broad handler: a host in doubt offers nothing
        return zero_sensor_lines(host, node.settings.sge_complexes)
    values = compute_sensor_values(rows, node.settings)
    return [f"{host}:{name}:{value}" for name, value in values.items()]


def zero_sensor_lines(host: str, complexes: tuple[str, ...]) -> list[str]:
    """Return the values of a host that offers nothing: what is not reported is not limited."""
    return [f"{host}:{name}:0" for name in (*complexes, "gpu.free")]


def read_sensor_rows(node: Node) -> list[DeviceState]:
    """Return the state of every device, judged afresh where no daemon keeps verdicts."""
    devices = node.devices()
    if is_gate_in_doubt(node.store.path):
        with Gate(node.store, deadline.Deadline(GATE_PATIENCE)):
            note_event(node.store.path, OPEN)
    view = read_node_view(node, deadline.clock_boottime())
    if view.lost:
        raise view.lost
    if view.full or view.fault:
        raise Refusal(UNKNOWN, view.fault or "LOCK_DIR is full", "run gpulock doctor")
    view.locks = {  # a health check gives way to any job
        name: lock
        for name, lock in view.held.items()
        if not (lock.owner and lock.owner.gives_way())
    }
    if view.verdicts is None:
        judge = make_sge_judge(node)
        view.verdicts = {
            lock.owner.token: judge.verdict(lock) for lock in view.held.values() if lock.owner
        }
    return states.device_states(devices, view, node.settings.expected_gpus)


def compute_sensor_values(states_now: list[DeviceState], settings: Settings) -> dict[str, int]:
    """Return the value of each complex. Pure.

    qmaster counts each complex alone. So of complexes of several kinds that have devices in common
    only what is free is offered: a job that holds one of them may have asked for another's.
    """
    devices = [row.device for row in states_now if row.device]
    kinds = {name: settings.sge_kinds.get(name, "") for name in settings.sge_complexes}
    ids = {name: {d.id for d in complex_devices(devices, settings, name)} for name in kinds}
    offered: dict[str, int] = {}
    for name, kind in kinds.items():
        rows = [row for row in states_now if row.device is None or row.id in ids[name]]
        others = [ids[n] for n, other in kinds.items() if other not in (kind, SHARE_KIND)]
        beside = any([other & ids[name] for other in others])
        if kind == SHARE_KIND:
            offered[name] = count_offered_shares(states_now, settings.shares)
        elif not beside and all(map(is_offered_row, rows)):
            offered[name] = len(rows)
        else:
            offered[name] = len([row for row in rows if row.state == states.FREE])
    counted = {
        "gpu.free": len([row for row in states_now if row.state == states.FREE]),
        "gpu.quarantined": len([r for r in states_now if r.state in OUT_STATES]),
    }
    return {**offered, **counted}


def complex_devices(devices: list[Device], settings: Settings, name: str) -> list[Device]:
    """Return the devices that a complex counts, none of shares."""
    kind = settings.sge_kinds.get(name) or settings.plain_request
    return [device for device in devices if is_of_kind(device, kind)]


def count_offered_shares(states_now: list[DeviceState], words: tuple[str, ...]) -> int:
    """Return how many shares qmaster may count: all, or the free ones while a card gives fewer."""
    from gpulock.alloc.shares import card_share_room

    held = {lock.id: lock for row in states_now for lock in row.locks()}
    room = card_share_room(states_now, held, words)
    rows = [row for row in states_now if row.id in room and row.state != states.FREE]
    served = all([is_held_by_jobs(row) and SHARE in row.locks()[0].id for row in rows])
    return sum([places if served else free for places, free in room.values()])


def is_offered_row(row: DeviceState) -> bool:
    """Return whether qmaster may offer a device: it is free, or a job of its own runs on it.

    One with a share held is not free for a job that asks for it whole, and qmaster has not counted
    it as such a job's.
    """
    if row.state not in (states.HELD, states.HELD_IDLE):
        return row.state == states.FREE
    return is_held_by_jobs(row) and SHARE not in row.locks()[0].id


def is_held_by_jobs(row: DeviceState) -> bool:
    """Return whether a device is held, by Grid Engine's jobs alone, which qmaster has counted."""
    owners = [lock.owner for lock in row.locks()]
    ours = [one for one in owners if one and one.scheduler == "sge" and not one.draining]
    return row.state in (states.HELD, states.HELD_IDLE) and 0 < len(ours) == len(owners)
