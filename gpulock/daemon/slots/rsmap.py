# SPDX-License-Identifier: Apache-2.0
"""The ids of an RSMAP on this host: those of devices that no job would get leave, and come back.

Open Cluster Scheduler grants an id as long as it stands in complex_values of the host, also that of
a card which no prolog would lock: its jobs would be sent back again and again. So the gpulockd of
this host takes it out, and puts it back when the device is free, or held by a job of qmaster's.
Only the one element is set, by -mattr: whatever else stands in complex_values is not ours to write.
What was taken out is noted before it is done, so that it comes back after a kill at any point.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Final

from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.daemon.core.journal import NOTICE, DaemonJournal
from gpulock.daemon.core.sge_client import ask_qmaster
from gpulock.daemon.reconcile.reconcile import Chore, ReconcileReport
from gpulock.errors import Refusal
from gpulock.node.context import Node
from gpulock.sge import card_map, sensor
from gpulock.store import atomic, kv, quarantine

EVERY: Final = 15.0  # seconds between two rounds
WITHDRAWN: Final = "sge-rsmap"  # in STATE_DIR: what was taken out
_ELEMENTS: Final = re.compile(r",(?![^()]*\))")
_VALUE: Final = re.compile(r"(\d+)(?:\((.*)\))?")
_RANGE: Final = re.compile(r"(\d+)-(\d+)")
_ID: Final = re.compile(r"([^\s\[\]]+)(\[[^\]]*\])?")
_WIDEST: Final = 4096  # ids of one range


def split_sge_elements(value: str) -> list[str]:
    """Return the elements of `a=1,b=2(x y)`: a comma in parentheses parts none; pure."""
    return [one.strip() for one in _ELEMENTS.split(value) if one.strip()]


def parse_rsmap(value: str) -> dict[str, str]:
    """Return id -> what stands for it in `2(gpu0[...] gpu1)`; raise ValueError.

    A count that is not that of the ids gives one of them to several jobs: qconf does not show
    which, so it is refused.
    """
    whole = _VALUE.fullmatch(value.strip())
    if whole is None:
        raise ValueError(f"{value[:60]} is no RSMAP")
    ids: dict[str, str] = {}
    for name, properties in _ID.findall(whole[2] or ""):
        span = _RANGE.fullmatch(name)
        if span and not properties and int(span[2]) - int(span[1]) < _WIDEST:
            ids.update({str(n): str(n) for n in range(int(span[1]), int(span[2]) + 1)})
        else:
            ids[name] = f"{name}{properties}"
    if len(ids) != int(whole[1]):
        raise ValueError(f"{value[:60]}: {whole[1]} of {len(ids)} ids; name each id once")
    return ids


def format_rsmap(ids: Mapping[str, str]) -> str:
    """Return the value of these ids; pure."""
    return f"{len(ids)}({' '.join(ids.values())})" if ids else "0"


def next_rsmap(
    current: str, out: Mapping[str, str], bad: Collection[str]
) -> tuple[str, dict[str, str]]:
    """Return what complex_values should say, and which ids are out then; pure; raise ValueError.

    What others added or took away meanwhile stays as it is: we put back only what we took, `out`.
    """
    now = parse_rsmap(current)
    known = {**out, **now}
    left = {
        one: known[one] for one in sorted(known, key=lambda one: (len(one), one)) if one not in bad
    }
    gone = {one: text for one, text in known.items() if one in bad}
    return current if left.keys() == now.keys() else format_rsmap(left), gone


def bad_card_ids(node: Node) -> tuple[str, dict[str, set[str]]]:
    """Return this host's name and the ids of each complex that no prolog would lock.

    Without a card in the map there is no name. Raises Refusal, OSError or ValueError.
    """
    host, cards = card_map.read_card_map(node.settings.state_dir)
    if not cards:
        return "", {}
    good = {row.id for row in sensor.read_sensor_rows(node) if sensor.is_offered_row(row)}
    good -= {*quarantine.read_device_notes(node.settings.state_dir, quarantine.RESERVE)}
    bad: dict[str, set[str]] = {}
    for (name, card), device in cards.items():
        bad.setdefault(name, set()).update([card] if device not in good else [])
    return host, bad


def sync_card_ids(
    state_dir: str, host: str, bad: Mapping[str, Collection[str]], ask: Callable[..., str]
) -> tuple[list[str], dict[str, str]]:
    """Bring each RSMAP of this host in step; return what was done, and what failed, by a key.

    `bad` has by complex the ids that no job is to get, `ask` starts a client of Grid Engine. Raises
    Refusal, OSError or ValueError.
    """
    done: list[str] = []
    wrong: dict[str, str] = {}
    values = parse_complex_values(ask("qconf", "-se", host))
    notes = load_withdrawn_ids(state_dir)
    for name, ids in bad.items():
        try:
            out = notes.get(name, {})
            wanted, gone = next_rsmap(values.get(name, ""), out, ids)
            notes[name] = {**out, **gone}  # what comes back is noted until it is there
            save_withdrawn_ids(state_dir, notes)
            if wanted != values.get(name):
                ask("qconf", "-mattr", "exechost", "complex_values", f"{name}={wanted}", host)
                now = parse_complex_values(ask("qconf", "-se", host)).get(name, "")
                if parse_rsmap(now) != parse_rsmap(wanted):
                    raise ValueError(f"it is {now}, not {wanted} as was set")
                without = f", without {' '.join(gone)}" if gone else ""
                done.append(f"Grid Engine grants {name}={wanted} on {host}{without}")
            notes[name] = gone
            save_withdrawn_ids(state_dir, notes)
        except (Refusal, ValueError) as fault:
            wrong[f"{host} {name}"] = f"{name} of {host}: {fault}"
    return done, wrong


def parse_complex_values(text: str) -> dict[str, str]:
    """Return the complex_values of a host, as `qconf -se` shows them; pure."""
    for line in text.replace("\\\n", " ").split("\n"):
        key, _, value = line.partition(" ")
        if key == "complex_values":
            pairs = [item.partition("=") for item in split_sge_elements(value)]
            return {name: amount.strip() for name, _, amount in pairs if amount}
    return {}


def load_withdrawn_ids(state_dir: str) -> dict[str, dict[str, str]]:
    """Return the ids that are taken out, by complex; raise OSError or ValueError."""
    try:
        pairs = kv.decode_pairs(atomic.read_text(f"{state_dir}/{WITHDRAWN}"))
    except FileNotFoundError:
        return {}
    return {name: parse_rsmap(value) for name, value in pairs.items()}


def save_withdrawn_ids(state_dir: str, notes: Mapping[str, Mapping[str, str]]) -> None:
    """Note what is taken out, to outlive a power cut; raise OSError."""
    if load_withdrawn_ids(state_dir) != (out := {name: one for name, one in notes.items() if one}):
        pairs = [(name, format_rsmap(one)) for name, one in sorted(out.items())]
        atomic.replace_file(
            f"{state_dir}/{WITHDRAWN}", kv.encode_pairs(pairs).encode(), durable=True
        )


class RsmapSync(Chore):
    """The chore that withdraws ids of cards which no job would get, and restores them."""

    def __init__(self, journal: DaemonJournal) -> None:
        self._journal = journal
        self.asking: BackgroundCall[tuple[list[str], dict[str, str]]] | None = None
        self._next = 0.0

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Take the answer of the last round where it is there, and begin one where it is due."""
        if self.asking is not None:
            if not self.asking.wait(0.0):
                return
            asked, self.asking = self.asking, None
            self._report(asked)
        settings = node.settings
        if now < self._next or not settings.sge_root:
            return
        self._next = now + EVERY
        host, bad, fault = "", dict[str, set[str]](), ""
        try:
            host, bad = bad_card_ids(node)
            if not any(bad.values()) and not load_withdrawn_ids(settings.state_dir):
                host = ""  # a thousand nodes where all is well ask qmaster nothing
        except (Refusal, OSError, ValueError) as reason:
            host, fault = "", f"the ids of cards stay as they are: {reason}"
        self._journal.log_state("sge ids", fault)
        if host:
            ask = partial(ask_qmaster, settings)
            self.asking = BackgroundCall(lambda: sync_card_ids(settings.state_dir, host, bad, ask))

    def _report(self, asked: BackgroundCall[tuple[list[str], dict[str, str]]]) -> None:
        try:
            done, wrong = asked.answer()
        except (Refusal, OSError, ValueError) as fault:
            done, wrong = [], {"round": f"ids at qmaster are not updated: {fault}"}
        for line in done:
            self._journal.say(NOTICE, line)
        self._journal.log_changes("sge rsmap", wrong)
