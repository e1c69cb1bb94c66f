# SPDX-License-Identifier: Apache-2.0
"""Grid Engine's count of a host, lowered while devices are out of service and raised again.

By the gpulockd of one admin host, for the hosts in SGE_COUNT_HOSTS: it asks qmaster what the load
sensors report (`gpu.quarantined`) and changes `complex_values`. The load sensor alone keeps jobs
away already; this is for sites whose tools read the configured count. It all happens in a thread:
a qmaster that does not answer holds up nobody.

Grid Engine has no compare-and-set. So what is wanted is noted before it is done; the count is
read, compared with what we know, set, and read again. After a kill at any point the note and
qmaster's own value say what is left to do. A value that is neither was set by others: gpulockd
does not change it until all devices of the host are good.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import ClassVar, Final, NamedTuple

from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.daemon.core.journal import NOTICE, DaemonJournal
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.schedule import QUARANTINE, TIME, Chore, Due
from gpulock.daemon.slots import rsmap
from gpulock.daemon.slots.rsmap import parse_complex_values
from gpulock.deadline import Deadline
from gpulock.errors import UNKNOWN, Refusal, one_line
from gpulock.node.context import Node
from gpulock.node.settings import Settings
from gpulock.sge import qstat
from gpulock.store import atomic, kv

EVERY: Final = 15.0  # seconds between two rounds
QUARANTINED_SENSOR: Final = "gpu.quarantined"  # what a load sensor reports: quarantined or missing
ALL: Final = 1_000_000  # more than any host has
DIGITS: Final = 6
_HOST: Final = re.compile(r"<host name='([^']*)'>(.*?)</host>", re.DOTALL)
_VALUE: Final = re.compile(r"<resourcevalue name='([^']*)' dominance='hl'>([^<]*)<")
_REQUEST: Final = re.compile(r'<hard_request name="([^"]*)"[^>]*>([^<]*)<')


class SyncResult(NamedTuple):
    """What a round did, line by line, and what it could not do, by a key."""

    done: list[str]
    wrong: dict[str, str]


class SgeSlotSync(Chore):
    """The chore; without hosts in the settings it still puts back what it once lowered."""

    after: ClassVar[Due] = {TIME: ("sge_root",), QUARANTINE: ("sge_root",)}

    def __init__(self, journal: DaemonJournal) -> None:
        self._journal = journal
        self.asking: BackgroundCall[SyncResult] | None = None
        self._next = 0.0

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Take the answer of the last round where it is there, and begin one where it is due."""
        asking = self.asking
        if asking is not None:
            if not asking.wait(0.0):
                return
            self.asking = None
            self._tell(asking)
        settings = node.settings
        if now < self._next or not settings.sge_root:
            return
        self._next = now + EVERY
        counts = bool(settings.sge_count_hosts) or has_lowered_counts(settings)
        fault = dict[str, str]()
        try:
            host, bad = rsmap.bad_card_ids(node)
        except (Refusal, OSError, ValueError) as reason:
            host, bad = "", {}
            fault["map"] = f"the ids of cards stay as they are: {reason}"
        self._journal.log_changes("sge ids", fault)
        if counts or host:
            self.asking = BackgroundCall(lambda: sync_qmaster(settings, counts, host, bad))

    def _tell(self, asking: BackgroundCall[SyncResult]) -> None:
        try:
            told = asking.answer()
        except (Refusal, OSError, ValueError) as fault:
            told = SyncResult([], {"round": f"counts at qmaster are not updated: {fault}"})
        for line in told.done:
            self._journal.say(NOTICE, line)
        self._journal.log_changes("sge count", told.wrong)


def sync_qmaster(
    settings: Settings, counts: bool, host: str, bad: Mapping[str, frozenset[str]]
) -> SyncResult:
    """Bring counts and this host's ids in step; raise Refusal, OSError or ValueError."""
    told = sync_sge_counts(settings) if counts else SyncResult([], {})
    if not host:
        return told
    ask = QmasterClient(settings).ask
    done, wrong = rsmap.sync_card_ids(settings.state_dir, host, bad, ask)
    return SyncResult([*told.done, *done], {**told.wrong, **wrong})


def has_lowered_counts(settings: Settings) -> bool:
    """Return whether something is lowered, or was to be; in doubt it is."""
    try:
        return bool(load_lowered_counts(settings.state_dir))
    except (OSError, ValueError):
        return True


def sync_sge_counts(settings: Settings) -> SyncResult:
    """Bring every count of every host in step; raise Refusal, OSError or ValueError."""
    notes = load_lowered_counts(settings.state_dir)
    hosts = sorted({*settings.sge_count_hosts, *(host for host, _ in notes)})
    master = QmasterClient(settings)
    out = parse_quarantined_counts(
        master.ask("qhost", "-F", QUARANTINED_SENSOR, "-xml")
    )  # with -h one unknown host fails for all
    running = master.ask("qstat", "-s", "r", "-u", "*", "-r", "-g", "t", "-xml")
    told = SyncResult([], {})
    for host in hosts:
        bad = out.get(host) if host in settings.sge_count_hosts else 0
        try:
            sync_host_counts(settings, master, host, bad, running, told)
        except Refusal as fault:
            told.wrong[host] = f"the count of {host} is not updated: {fault.why}"
    return told


def sync_host_counts(
    settings: Settings,
    master: QmasterClient,
    host: str,
    bad: int | None,
    running: str,
    told: SyncResult,
) -> None:
    """Bring every count of one host in step; raise Refusal or OSError."""
    values = parse_complex_values(master.ask("qconf", "-se", host))
    if bad is None:
        told.wrong[host] = (
            f"no load sensor reports how many devices of {host} are out ({QUARANTINED_SENSOR})"
        )
    for name in [name for name in settings.sge_complexes if name in values]:
        if "(" in values[name]:
            continue  # an RSMAP: the host's own gpulockd takes its ids out
        if settings.sge_kinds.get(name):
            continue  # its own load sensor value is of its kind; how many are out is of all
        if not values[name].isdecimal():
            told.wrong[f"{host} {name}"] = f"{name}={values[name]} of {host} is no count"
            continue
        booked = booked_complex_amount(running, host, name)
        sync_complex_count(settings, master, (host, name), int(values[name]), bad, booked, told)


def sync_complex_count(
    settings: Settings,
    master: QmasterClient,
    key: Key,
    current: int,
    bad: int | None,
    booked: int,
    told: SyncResult,
) -> None:
    """Bring one count in step: note, set, read again, note; raise Refusal or OSError."""
    host, name = key
    notes = load_lowered_counts(settings.state_dir)
    act = next_sync_step(notes.get(key), current, bad, booked)
    if act.told:
        told.wrong[f"{host} {name}"] = f"{name} of {host}: {act.told}"
    update_lowered_count(settings, notes, key, act.note)
    if act.value is None or act.note is None:
        return
    master.ask("qconf", "-mattr", "exechost", "complex_values", f"{name}={act.value}", host)
    found = parse_complex_values(master.ask("qconf", "-se", host)).get(name)
    if found != str(act.value):
        told.wrong[f"{host} {name}"] = f"{name} of {host} is {found}, not {act.value} as was set"
        return
    again = next_sync_step(act.note, act.value, bad, booked)
    update_lowered_count(settings, notes, key, again.note)
    told.done.append(f"Grid Engine counts {name}={act.value} on {host}, {bad} out of service")


def update_lowered_count(
    settings: Settings, notes: dict[Key, LoweredCount], key: Key, wanted: LoweredCount | None
) -> None:
    """Keep what is known of one count, where that is new; raise OSError."""
    if notes.get(key) == wanted:
        return
    if wanted is None:
        del notes[key]
    else:
        notes[key] = wanted
    save_lowered_counts(settings.state_dir, notes)


class QmasterClient:
    """qmaster, as this host's clients reach it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def ask(self, program: str, *words: str) -> str:
        """Return what a client prints; raise Refusal for one that fails or hangs."""
        client = qstat.make_sge_client(self._settings, program)
        client.env["SGE_SINGLE_LINE"] = "1"
        code, said = client.answer(list(words), Deadline(self._settings.sge_qstat_timeout))
        text = said.decode("utf-8", "replace")
        if code != 0:
            last = one_line(text.strip())[-200:]
            raise Refusal(UNKNOWN, f"{program} {words[0]} failed: {last}", qstat.HINT)
        return text


def parse_quarantined_counts(xml: str) -> dict[str, int]:
    """Return how many devices each host's sensor reports as out of service; none: not told."""
    found: dict[str, int] = {}
    for host, inner in _HOST.findall(xml):
        for name, value in _VALUE.findall(inner):
            whole = value.partition(".")[0]
            if name == QUARANTINED_SENSOR and whole.isdecimal() and len(whole) <= kv.DIGITS:
                found[host] = int(whole)
    return found


def booked_complex_amount(xml: str, host: str, name: str) -> int:
    """Return how much of a complex the running jobs have on a host, at the most.

    Each line of `qstat -g t` is a slot, or the master of a parallel job beside them.
    """
    return sum(
        slots * parse_booked_amount(amount)
        for block, slots in iter_host_job_slots(xml, host)
        for wanted, amount in _REQUEST.findall(block)
        if wanted == name
    )


def parse_booked_amount(text: str) -> int:
    """Return how much a job asks for, at the most; what is not plain is all there is.

    Users write it: `1K`, `0x10` and fractions are accepted at submission.
    """
    plain = text.strip()
    return int(plain) if plain.isascii() and plain.isdigit() and len(plain) < DIGITS else ALL


def iter_host_job_slots(xml: str, host: str) -> Iterable[tuple[str, int]]:
    """Return what is said of each job on a host, and the slots that it has there."""
    for block in xml.split("<job_list")[1:]:
        queue = block.partition("<queue_name>")[2].partition("</queue_name>")[0]
        if queue.rpartition("@")[2] == host:
            slots = block.partition("<slots>")[2].partition("</slots>")[0]
            yield block, max(1, kv.int_or_zero(slots))


NAME: Final = "sge-count"  # in STATE_DIR
LIMIT: Final = 1 << 20  # bytes
WANTED, DONE, THEIRS = "wanted", "done", "theirs"
Key = tuple[str, str]  # host, complex
FIELDS: Final = 4


class LoweredCount(NamedTuple):
    """A count that we lowered: `base` before, `was` the last, `now` what is to be; how far."""

    base: int
    was: int
    now: int
    stage: str


class SyncStep(NamedTuple):
    """What to note first (None: forget), what to set then (None: nothing), what to tell."""

    note: LoweredCount | None
    value: int | None = None
    told: str = ""


def next_sync_step(
    note: LoweredCount | None, current: int, bad: int | None, booked: int
) -> SyncStep:
    """Return the next step for one count, `current` at qmaster now.

    `bad` devices are out of service, None where nobody tells; `booked` is what its jobs hold at
    most. The count never falls below that.
    """
    if bad is None:
        return SyncStep(note)
    ours = note is not None and (
        current in (note.now, note.was) if note.stage == WANTED else current == note.now
    )
    if note is not None and (note.stage == THEIRS or not ours):
        if not bad:
            return SyncStep(None)
        told = f"it was set to {current} by others, and gpulock does not change it"
        return SyncStep(LoweredCount(current, current, current, THEIRS), None, told)
    base = note.base if note is not None else current
    want = max(base - bad, min(booked, base), 0) if bad else base
    if want != current:
        return SyncStep(LoweredCount(base, current, want, WANTED), want)
    if not bad or note is None:
        return SyncStep(None)
    return SyncStep(note._replace(was=current, now=current, stage=DONE))


def parse_lowered_counts(text: str) -> dict[Key, LoweredCount]:
    """Return the notes in a text; raise ValueError."""
    found: dict[Key, LoweredCount] = {}
    for key, value in kv.decode_pairs(text).items():
        host, _, name = key.partition(" ")
        words = value.split()
        if len(words) != FIELDS or words[3] not in (WANTED, DONE, THEIRS):
            raise ValueError(f"not understood: {key}={value[:40]}")
        found[host, name] = LoweredCount(int(words[0]), int(words[1]), int(words[2]), words[3])
    return found


def format_lowered_counts(found: Mapping[Key, LoweredCount]) -> str:
    """Return the notes as a text."""
    return kv.encode_pairs(
        [(f"{host} {name}", " ".join(map(str, one))) for (host, name), one in sorted(found.items())]
    )


def load_lowered_counts(state_dir: str) -> dict[Key, LoweredCount]:
    """Return the notes; raise OSError or ValueError where they cannot be read."""
    try:
        return parse_lowered_counts(atomic.read_text(f"{state_dir}/{NAME}", LIMIT))
    except FileNotFoundError:
        return {}


def save_lowered_counts(state_dir: str, found: Mapping[Key, LoweredCount]) -> None:
    """Write the notes, to outlive a power cut: they know what was there; raise OSError."""
    path = f"{state_dir}/{NAME}"
    atomic.replace_file(path, format_lowered_counts(found).encode(), durable=True)
