# SPDX-License-Identifier: Apache-2.0
"""Count the refusals that say nothing of the job: several in a row mean a broken node.

Hot, loaded where a claim is refused.
"""

from gpulock.errors import BROKEN, UNKNOWN, Refusal
from gpulock.node.context import Node
from gpulock.store.event_kinds import CLAIM, ENTERED, TIMEOUT, UNDONE, UNKNOWN_REQUEST
from gpulock.store.event_log import read_events
from gpulock.store.events import format_claimant, note_claim, note_event
from gpulock.store.owner import Owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulock.store.event_kinds import Event

STREAK_JOBS, STREAK_USERS = 3, 2  # unknowns of so many jobs and users in a row: a broken node


def count_refusal(node: Node, refusal: Refusal, claimant: Owner, waited: float) -> None:
    """Note a refusal; a streak of unknowns means that the node is broken, not the jobs."""
    name = format_claimant(claimant.user, claimant.job())
    if refusal.kind == UNKNOWN:
        # The hook has set it once its claim was made: this refusal undoes a grant.
        undone = bool(claimant.token)
        try:
            if is_unknown_streak(read_events(node.store.path), name, undone):
                escalate_refusal(refusal)
        except OSError:
            pass  # nobody can say what came before
        kind = UNDONE if undone else UNKNOWN_REQUEST
        note_event(node.store.path, kind, name)
    note_claim(node.store.path, refusal.kind, name, waited)


def note_lock_timeout(node: Node, refusal: Refusal, claimant: Owner) -> None:
    """Note that the gate stayed shut; for several users in a row it is a fault of the node."""
    name = format_claimant(claimant.user, claimant.job())
    note_event(node.store.path, TIMEOUT, name)
    try:
        if is_timeout_streak(read_events(node.store.path)):
            escalate_refusal(refusal)
    except OSError:
        return


def escalate_refusal(refusal: Refusal) -> None:
    """Make an unknown that several jobs of several users met a fault of the node."""
    refusal.kind = BROKEN
    refusal.why += " (for several jobs in a row)"


def is_unknown_streak(events: "list[Event]", name: str, is_undone: bool) -> bool:
    """Return whether another unknown, of `name`, makes jobs of several users in a row. Pure.

    A grant ends the row, unless it was undone. `is_undone`: this refusal undoes one of `name`.
    """
    names, undone = {name}, {name} if is_undone else set[str]()
    for _, kind, words in reversed(events):
        if kind in (UNKNOWN_REQUEST, UNDONE):
            names.add(words)
            if kind == UNDONE:
                undone.add(words)
        elif kind == CLAIM and words.startswith("granted "):
            if words.rpartition(" ")[2] in undone:
                continue
            break
    return is_streak(names)


def is_timeout_streak(events: "list[Event]") -> bool:
    """Return whether jobs of several users found the gate shut since somebody got in. Pure."""
    names: set[str] = set()
    for _, kind, words in reversed(events):
        if kind in ENTERED:
            break
        if kind == TIMEOUT:
            names.add(words)
    return is_streak(names)


def is_streak(names: set[str]) -> bool:
    """Return whether jobs of several users, each `USER:JOB`, mean a broken node. Pure."""
    users = {one.partition(":")[0] for one in names}
    return len(names) >= STREAK_JOBS and len(users) >= STREAK_USERS
