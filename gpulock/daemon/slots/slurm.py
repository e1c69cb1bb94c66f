# SPDX-License-Identifier: Apache-2.0
"""What Slurm is told while devices of this node are out of service (SLURM_ON_UNHEALTHY).

Slurm 22.05 has nothing between one device and the whole node: a GRES with File= keeps its count,
one without can be lowered but fails its node's next registration, a reservation holds no GRES
(docs/quarantine.md has what was measured). So by default nothing is done; `drain` drains the node
with a reason of ours, and takes back that drain and no other. The reason at slurmctld is the
record: after a kill at any point the next round finds it there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, NamedTuple

from gpulock.daemon.core.background_call import BackgroundCall
from gpulock.daemon.core.journal import NOTICE, DaemonJournal
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.daemon.reconcile.schedule import Chore
from gpulock.errors import UNKNOWN, Refusal, one_line, shorten
from gpulock.node.context import Node
from gpulock.node.devices import card_bus_id
from gpulock.node.settings import Settings
from gpulock.slurm import gres_map
from gpulock.slurm.refuse import quote_scontrol_text
from gpulock.slurm.scontrol import HINT, SlurmctldClient
from gpulock.store import quarantine

EVERY: Final = 15.0  # seconds between two rounds
PREFIX: Final = "gpulock quarantine: "  # of our reason
LENGTH: Final = 180  # bytes of a reason
DRAIN: Final = "drain"


class DrainAction(NamedTuple):
    """What to ask of scontrol (nothing: empty), the devices to note then, what to tell."""

    words: tuple[str, ...]
    noted: str
    told: str = ""


def decide_drain_action(state: str, reason: str, bad: Mapping[str, str], noted: str) -> DrainAction:
    """Return what is to be done about a node, by slurmctld's word for its state.

    `bad` has the reason of each device that is out, `noted` those for which it was drained by us.
    A drain that is not ours stays, and so does a node that somebody resumed after ours.
    """
    drained = "DRAIN" in state.replace("*", "+").split("+")
    ours = drained and reason.startswith(PREFIX)
    names = " ".join(sorted(bad))
    if not bad:
        return DrainAction(("State=UNDRAIN",) if ours else (), "")
    wanted = format_drain_reason(bad)
    if ours:
        return DrainAction(
            () if reason == wanted else (f"Reason={quote_scontrol_text(wanted)}",), names
        )
    if drained:
        return DrainAction((), noted)
    if noted and set(names.split()) <= set(noted.split()):
        return DrainAction(
            (), noted, "the node was resumed by hand, and gpulock does not change it"
        )
    return DrainAction(("State=DRAIN", f"Reason={quote_scontrol_text(wanted)}"), names)


def format_drain_reason(bad: Mapping[str, str]) -> str:
    """Return the reason of a drain."""
    name, why = sorted(bad.items())[0]
    more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
    plain = one_line(f"{PREFIX}{name}: {why}").replace('"', "'")
    return shorten(plain, LENGTH - len(more)) + more


class SlurmDrainSync(Chore):
    """The chore."""

    def __init__(self, journal: DaemonJournal) -> None:
        self._journal = journal
        self.asking: BackgroundCall[DrainAction] | None = None
        self._next = 0.0
        self._first = True  # an earlier gpulockd may have drained
        self._noted = ""  # for which devices this one drained the node

    def run(self, node: Node, report: ReconcileReport, now: float) -> None:
        """Take the answer of the last round where it is there, and begin one where it is due."""
        settings = node.settings
        if not report.devices:
            return  # a driver that is away says nothing of any card
        bad = read_out_of_service(node, report)
        asking = self.asking
        if asking is not None:
            if not asking.wait(0.0):
                return
            self.asking = None
            self._tell(asking)
        drains = settings.slurm_on_unhealthy == DRAIN
        here = drains or os.path.exists(f"{settings.state_dir}/{gres_map.NAME}")
        if now < self._next or not (self._noted or (drains and bad) or (here and self._first)):
            return
        self._next, self._first = now + EVERY, False
        name, wanted, noted = node.name, bad if drains else {}, self._noted
        self.asking = BackgroundCall(lambda: sync_slurm_drain(settings, name, wanted, noted))

    def _tell(self, asking: BackgroundCall[DrainAction]) -> None:
        wrong: dict[str, str] = {}
        try:
            done = asking.answer()
        except (Refusal, OSError, ValueError) as fault:
            self._first = True  # what an earlier gpulockd drained is still not known
            wrong["round"] = f"Slurm cannot be told which devices are out of service: {fault}"
        else:
            self._noted = done.noted
            if done.words:
                self._journal.say(NOTICE, f"updated Slurm: {' '.join(done.words)}")
            if done.told:
                wrong["resumed"] = done.told
        self._journal.log_changes("slurm count", wrong)


def read_out_of_service(node: Node, report: ReconcileReport) -> dict[str, str]:
    """Return why each device of this node that is out is out; raise Refusal."""
    notes = quarantine.read_device_notes(node.settings.state_dir, quarantine.QUARANTINE)
    found = {name: note.get("reason", "no reason noted") for name, note in notes.items()}
    buses = {device.bus for device in report.devices} | {card_bus_id(name) for name in found}
    if len(buses) < node.settings.expected_gpus:
        gone = node.settings.expected_gpus - len(buses)
        found["missing"] = f"{gone} of {node.settings.expected_gpus} GPUs are not there"
    return found


def sync_slurm_drain(
    settings: Settings, host: str, bad: Mapping[str, str], noted: str
) -> DrainAction:
    """Ask for the node's state and do what is due; raise Refusal or OSError."""
    control = SlurmctldClient(settings)
    name = find_slurm_node_name(control, host)
    state, reason = parse_slurm_node_state(
        run_scontrol_checked(control, "show", "node", "-o", name)
    )
    due = decide_drain_action(state, reason, bad, noted)
    if due.words:
        run_scontrol_checked(control, "update", f"NodeName={name}", *due.words)
    return due


def find_slurm_node_name(control: SlurmctldClient, host: str) -> str:
    """Return the one node that Slurm takes this machine for; raise Refusal."""
    found: list[str] = []
    for one in dict.fromkeys((host, host.partition(".")[0])):
        found = run_scontrol_checked(control, "show", "aliases", one).split()
        if len(found) == 1:
            return found[0]
    known = " ".join(found) or "no node"
    raise Refusal(UNKNOWN, f"{host} is {known} to Slurm", "one is expected")


def run_scontrol_checked(control: SlurmctldClient, *words: str) -> str:
    """Return what scontrol says; raise Refusal for a failure."""
    code, said = control.run("scontrol", *words)
    if code != 0:
        raise Refusal(UNKNOWN, f"scontrol {words[0]}: {one_line(said.strip())[-200:]}", HINT)
    return said


def parse_slurm_node_state(line: str) -> tuple[str, str]:
    """Return state and reason of a node as `scontrol show node -o` has them."""
    state = line.partition(" State=")[2].split(None, 1)[:1]
    reason = line.partition(" Reason=")[2].rpartition(" [")[0]
    return (state[0] if state else "", reason.strip())
