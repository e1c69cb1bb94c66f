# SPDX-License-Identifier: Apache-2.0
"""One file of each format that gpulock keeps, as this version writes it and as it reads it.

`python -m tests.support.formats FILE` records a release for test_formats.py: the files, what they
say, and the tables of their fields. It runs under an earlier version of gpulock as well.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from gpulock.alloc.process_owner import RUN
from gpulock.daemon.core import sample
from gpulock.daemon.core.sample import FINISHED_LINE, SAMPLE_LINE, parse_sample
from gpulock.daemon.health.cards import NodeCards, parse_cards
from gpulock.daemon.history.record import (
    ClaimedDevice,
    ExporterSamples,
    build_history_record,
    encode_history_record,
)
from gpulock.daemon.reconcile.inventory_file import format_inventory, read_inventory_file
from gpulock.daemon.slots.rsmap import load_withdrawn_ids, save_withdrawn_ids
from gpulock.install.slurm.gres import GresSource, slurm_map_text
from gpulock.node import settings
from gpulock.node.device_list import read_nvml_inventory
from gpulock.node.devices import Device
from gpulock.report.claims import parse_reported_claim
from gpulock.sge.card_map import format_card_map, read_card_map
from gpulock.slurm.gres_map import read_gres_map, read_shared_gres
from gpulock.slurm.note import TaskNote, parse_task_note
from gpulock.store import event_kinds, events, owner
from gpulock.store.event_log import count_events, list_refusals, read_events
from gpulock.store.owner import Owner, encode_owner, parse_owner
from gpulock.store.quarantine import QUARANTINE, read_device_notes, read_suspect_cards
from gpulock.store.verdicts import SHEPHERD, read_dated_verdicts
from gpulock.store.verdicts import VERSION_LINE as VERDICTS_LINE
from gpulock.workstation.wire import (
    CLAIM,
    GRANTED,
    SocketReply,
    SocketRequest,
    encode_packet,
    parse_reply,
    parse_request,
)

BOOT = "0b0e3f6a-5a0c-4f0e-9d58-7c1f1a2b3c4d"
NOW = 1000.0  # CLOCK_BOOTTIME
CARD, OTHER = "0000:3b:00.0", "0000:5e:00.0"
UUID = "GPU-5fd4f087-86f3-7a43-b711-4771313afc50"
CLAIM_FIELDS: Mapping[str, Any] = {
    "cluster": "default",
    "node": "node1",
    "user": "alice",
    "uid": 1001,
    "boot_id": BOOT,
    "claimed_at": 1.7e9,
    "claimed_boottime": 900.0,
    "token": "feedbeef",
    "uuids": (UUID, ""),
    "minors": ("0", "1"),
    "devices": (CARD, OTHER),
}
OWNERS: Mapping[str, Mapping[str, Any]] = {
    "sge": {
        "job_id": "12",
        "task_id": "3",
        "pid": 4711,
        "start": 5678,
        "queue": "gpu.q",
        "spool_dir": "/var/spool/node1/active_jobs/12.3",
        "add_grp_id": 20001,
        "namespaces": "4026531836",
        "draining": 1,
    },
    "slurm": {
        "job_id": "77",
        "restart": 2,
        "slurmd": "node1",
        "queue": "main",
        "positions": "0,1",
        "het_leader": "76",
        "sluid": "s4P",
    },
    "process": {
        "job_id": "4711",
        "pid": 4711,
        "start": 5678,
        "sid": 4711,
        "namespaces": "4026531836",
        "comment": RUN,
    },
    "admin": {"job_id": CARD, "comment": "driver test"},
}
LINES: Mapping[str, tuple[str, ...]] = {  # what other programs or other hosts write here
    "verdicts": (VERDICTS_LINE, f"boot_id={BOOT}", "checked_boottime=990.0", "feedbeef=dead gone"),
    "quarantine/" + CARD: ("by=gpulock", "reason=xid: 79", "at=1700000000", "since=17.000"),
    "sample": (
        SAMPLE_LINE,
        f"boot_id={BOOT}",
        "sequence=7",
        "boottime=999.5",
        "wall=1700000099.5",
        "looked=999.4",
        "driver=550.54",
        f"device {CARD} uuid={UUID} index=0 utilization=0.5 memory_used=1024 memory_total=2048 "
        "power=250.0 foreign_pids=17,18 c.energy=1,2,3,4",
        f"token feedbeef {CARD} since=900.0 busy=40.0 observed=80.0 seen=999.0 idle=0.0 width=1.0 "
        "used=500,1000 covered=1000,1000",
        f"lost {OTHER} 990.0 it does not answer",
    ),
    "exporter/finished/feedbeef": (
        FINISHED_LINE,
        f"boot_id={BOOT}",
        f"token feedbeef {CARD} since=900.0 busy=40.0 observed=80.0 seen=980.0 width=64.0 "
        "used=32000,8000 covered=64000,16000 energy=9000.0 memory_peak=1024",
    ),
    "settings": (
        "# gpulock-settings 1: obeyed last of '/etc/gpulock/gpulock.conf'; not to be edited",
        "EXPECTED_GPUS='8'",
        "SGE_COMPLEXES='gpu gpuj'",
        "QUARANTINE_ON='xid missing'",
        "ISOLATION='cgroup'",
        "# end",
    ),
}


def make_owner(scheduler: str) -> Owner:
    """Return a record of a claim of this scheduler."""
    return Owner(scheduler=scheduler, **{**CLAIM_FIELDS, **OWNERS[scheduler]})


def make_history_line(root: Path) -> bytes:
    """Return the line of a claim whose use the exporter has told."""
    parts = [
        ClaimedDevice(name, make_owner("sge"), 1.7e9 + 90, "epilog", 90.0) for name in (CARD, OTHER)
    ]
    device = Device(CARD, 0)
    device.model, device.memory_mib = "H200", 141
    advice = ExporterSamples(str(root / "exporter"))
    return encode_history_record(build_history_record(parts, advice, {CARD: device}))


def make_task_note() -> TaskNote:
    """Return the note of a granted job."""
    note = TaskNote("node1", "77", 1001, 2)
    first, second = Device(CARD, 0), Device(OTHER, 1)
    first.uuid = UUID
    note.token, note.devices, note.positions = "feedbeef", [first, second], ["0", "1"]
    note.binds, note.refused, note.code = "/a:/b", "GPU 1: no", 213
    return note


def write_formats(root: Path) -> None:
    """Write one file of each format into an empty folder."""
    for name, lines in LINES.items():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("\n".join(lines) + "\n")
    for scheduler in OWNERS:
        (root / f"owner.{scheduler}").write_text(encode_owner(make_owner(scheduler)))
    who = events.format_claimant("alice", "12")
    events.note_event(str(root), event_kinds.CLAIM, "granted", "0.25", who)
    events.note_event(str(root), event_kinds.REAPED, SHEPHERD)
    events.note_event(str(root), event_kinds.UNKNOWN_REQUEST, who)
    events.note_event(str(root), event_kinds.REFUSED, "12", "gpulock: job 12: busy: no GPU; wait")
    log = (root / "events").read_text()
    (root / "events").write_text(re.sub(r"(?m)^[0-9.]+ ", "990.500 ", log))
    cards = {f"gpu.{CARD}.uuid": UUID, f"gpu.{CARD}.memory_mib": "141", f"gpu.{OTHER}.mig": "1"}
    more = {f"link.{CARD}.{OTHER}": "18", f"mig.{OTHER}.gi1.ci0.uuid": "MIG-1"}
    (root / "inventory").write_text(format_inventory({**cards, **more}, BOOT))
    (root / "history").write_bytes(make_history_line(root))
    (root / "task").write_text(make_task_note().encode())
    (root / "slurm-map").write_text(
        slurm_map_text(GresSource("", "", ""), ["0", "1.gi1.ci0"], ("shard",))
    )
    (root / "sge-map").write_text(format_card_map("node1", {("gpu", "GPU1"): CARD}))
    save_withdrawn_ids(str(root), {"gpu": {"gpu1": "gpu1[mem=4G]"}})
    (root / "cards").write_text(make_cards().text())
    request = SocketRequest(CLAIM, 4711, 5678, 2, (CARD, OTHER), 60.0, "run")
    (root / "request").write_bytes(encode_packet(request))
    reply = SocketReply(GRANTED, "feedbeef", (CARD,), 3, "busy", "no GPU is free", "wait")
    (root / "reply").write_bytes(encode_packet(reply))


def make_cards() -> NodeCards:
    """Return what gpulockd knows of two cards."""
    cards = NodeCards(BOOT)
    card, other = cards.of(CARD), cards.of(OTHER)
    card.checks, card.most, card.tested = {"command": "", "memory": "3 MiB"}, (16, 18), 900.5
    other.suspect = "it does not answer"
    cards.known, cards.marks = {CARD, OTHER}, {(CARD, "xid 79"): 2}
    cards.sequence, cards.loaded = 4711, 2.5
    cards.xids = {(CARD, 79): (2, 905.5)}
    cards.backs = [(1700000000.0, CARD)]
    return cards


def read_owner(name: str, root: Path) -> object:
    """Return an owner record."""
    return parse_owner((root / name).read_text())


def read_gres(root: Path) -> object:
    """Return what the map of Slurm's positions says."""
    return read_gres_map(str(root)), read_shared_gres(str(root))


NAMES = {  # of types
    **{"str": "text", "int | None": "count", "float | None": "real"},
    **{str(str): "text", str(int): "number", str(float): "real"},
}
FIELDS: Mapping[str, list[list[str]]] = {  # what names each field, its type, a setting's default
    "owner": [[key, NAMES.get(str(kind), "list")] for key, kind in owner.TYPES.items()],
    "sample": [
        [line, key, NAMES.get(kind, "list")]
        for line, fields in sample.TYPES.items()
        for key, kind in fields.items()
    ],
    "settings": [[row[0], row[1], row[2]] for row in vars(settings)["KEYS"]],
}
READERS: Mapping[str, Callable[[Path], object]] = {
    **{f"owner.{name}": partial(read_owner, f"owner.{name}") for name in OWNERS},
    "verdicts": lambda root: read_dated_verdicts(str(root), NOW, BOOT),
    "suspects": lambda root: read_suspect_cards(str(root), BOOT),
    "cards": lambda root: parse_cards((root / "cards").read_text(), BOOT),
    "events": lambda root: (
        count_events(read_events(str(root))),
        list_refusals(read_events(str(root))),
    ),
    "quarantine": lambda root: read_device_notes(str(root), QUARANTINE),
    "sample": lambda root: parse_sample((root / "sample").read_text(), SAMPLE_LINE),
    "finished": lambda root: parse_sample(
        (root / "exporter/finished/feedbeef").read_text(), FINISHED_LINE
    ),
    "inventory": lambda root: read_nvml_inventory(str(root), BOOT),
    "exporter's inventory": lambda root: read_inventory_file(str(root / "inventory"), BOOT),
    "history": lambda root: read_history_facts(root / "history"),
    "task": lambda root: parse_task_note((root / "task").read_text()),
    "slurm-map": read_gres,
    "sge-map": lambda root: [str(part) for part in read_card_map(str(root))],
    "sge-rsmap": lambda root: load_withdrawn_ids(str(root)),
    "settings": lambda root: settings.parse_settings((root / "settings").read_text(), "/x").given,
    "request": lambda root: parse_request((root / "request").read_bytes()),
    "reply": lambda root: parse_reply((root / "reply").read_bytes()),
}


def read_history_facts(path: Path) -> Any:
    """Return what a line of the history says, the times of a device beside its other facts.

    Of a device that was not observed no busy time is known.
    """
    claim = plain_value(parse_reported_claim(json.loads(path.read_bytes())))
    for card in claim["cards"]:
        card.update(card["times"])
        card["busy"] = card["busy"] if card["observed"] else None
    return claim


def read_formats(root: Path) -> dict[str, Any]:
    """Return what each file says, as JSON has it; raise what a reader raises."""
    return {name: plain_value(read(root)) for name, read in READERS.items()}


def plain_value(found: object) -> Any:
    """Return an object as JSON has it: what has fields becomes an object of them."""
    if found is None or isinstance(found, (str, int, float)):
        return found
    if isinstance(found, Mapping):
        pairs = cast("Mapping[object, object]", found)
        return {
            key if isinstance(key, str) else json.dumps(key): plain_value(value)
            for key, value in pairs.items()
        }
    if hasattr(found, "_asdict"):
        return plain_value(cast("Any", found)._asdict())
    if isinstance(found, (list, tuple, set, frozenset)):
        items = [plain_value(one) for one in cast("list[object]", found)]
        return sorted(items) if isinstance(found, (set, frozenset)) else items
    kind = type(found)
    fields = {**getattr(kind, "__annotations__", {}), **getattr(found, "__dict__", {})}
    names = list(getattr(kind, "__slots__", ())) or list(fields)
    return {name: plain_value(getattr(found, name)) for name in names}


def record_release(scratch: Path) -> dict[str, Any]:
    """Return all that is recorded of this version: files, what they say, fields."""
    write_formats(scratch)
    files = sorted(path for path in scratch.rglob("*") if path.is_file())
    return {
        "files": {str(path.relative_to(scratch)): path.read_text() for path in files},
        "read": read_formats(scratch),
        "fields": FIELDS,
    }


def format_release(recorded: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what was recorded as JSON with a line for each format."""
    sections = [
        f"{json.dumps(name)}: {{\n "
        + ",\n ".join([f"{json.dumps(key)}: {json.dumps(one)}" for key, one in sorted(of.items())])
        + "\n}"
        for name, of in recorded.items()
    ]
    return "{" + ",\n".join(sections) + "}\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        recorded = record_release(Path(scratch))
    Path(sys.argv[1]).write_text(format_release(recorded))
