# SPDX-License-Identifier: Apache-2.0
"""An installation is a list of items, each of which can be put in place, shown and taken away.

An item keeps no memory: what is there is read each time. So a second run changes nothing, and one
that was cut short is run again. Nothing is believed by an exit code: the text of each is read back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from gpulock.install import files
from gpulock.install.files import InstallError
from gpulock.text.words import format_count

Echo = Callable[[str], None]
_SHOWN: Final = 12  # lines: a longer text (a script of ours) is only counted


class Wanted(Enum):
    """What an item is to be: there after an installation, gone after an uninstallation."""

    PRESENT = "installed"
    ABSENT = "uninstalled"


@dataclass(frozen=True)
class Remainder:
    """What a run leaves to the administrator: a clause for the verdict, and a page of what to do.

    No item that comes later in the run is changed then. `do` is what doctor says for the page.
    """

    clause: str
    page: Sequence[str] = ()
    do: str = ""


class Item:
    """One thing that gpulock puts on a node or into a cluster, and takes away again.

    It needs all that come before it in the list: so they are there first, and go later. `text` is
    what is there once it is installed.
    """

    title: str
    text: str | None = None

    def read(self) -> str | None:
        """Return what is there, None for nothing; raise InstallError."""
        return None

    def goal(self, wanted: Wanted) -> str | None:
        """Return what is to be there, what is where a run leaves it alone; raise InstallError."""
        return self.text if wanted is Wanted.PRESENT else None

    def show(self, wanted: Wanted) -> list[str]:
        """Return what this run would change, as lines with `-` and `+`; raise InstallError."""
        return difference_lines(self.read(), self.goal(wanted))

    def write(self, wanted: Wanted) -> None:
        """Put it in place, or take it away; raise InstallError."""

    def remainder(self, wanted: Wanted) -> Remainder | None:
        """Return what this run leaves to the administrator; raise InstallError."""
        del wanted
        return None


class ByHand(Item):
    """What is the administrator's to change: `ask` finds out what is left of it."""

    def __init__(self, title: str, ask: Callable[[], Remainder | None]) -> None:
        self.title, self.ask = title, ask

    def remainder(self, wanted: Wanted) -> Remainder | None:
        del wanted
        return self.ask()


class FileItem(Item):
    """A text file, replaced whole."""

    def __init__(self, path: Path, text: str | None) -> None:
        self.path, self.text = path, text
        self.title = f"file {path}"

    def read(self) -> str | None:
        return files.read_file(self.path)

    def write(self, wanted: Wanted) -> None:
        text = self.goal(wanted)
        if text is None:
            files.remove_file(self.path)
        else:
            files.write_file(self.path, text)


def difference_lines(before: str | None, after: str | None) -> list[str]:
    """Return the lines that go, with `-`, and those that come, with `+`; pure."""
    if before == after:
        return []
    gone, come = _lines_only_in(before, after), _lines_only_in(after, before)
    lines = [*(f"  - {line}" for line in gone), *(f"  + {line}" for line in come)]
    return lines or ["  (blank or repeated lines, or their order)"]


def _lines_only_in(value: str | None, other: str | None) -> list[str]:
    """Return the lines that one value has and the other has not; of many their number."""
    known = (other or "").splitlines()
    lines = [line for line in (value or "").splitlines() if line.strip() and line not in known]
    return lines if len(lines) <= _SHOWN else [f"({len(lines)} lines)"]


@dataclass
class Outcome:
    """What a run changed, by title, and what it leaves to the administrator."""

    changed: list[str] = field(default_factory=list[str])
    remainders: list[Remainder] = field(default_factory=list[Remainder])

    def clauses(self) -> list[str]:
        """Return what is left to the administrator, each once."""
        return [*dict.fromkeys(one.clause for one in self.remainders)]

    def verdict(self, system: str, wanted: Wanted, dry_run: bool) -> str:
        """Return the sentence that ends a run."""
        left, present = "; ".join(self.clauses()), wanted is Wanted.PRESENT
        if dry_run:
            would = f"{format_count(len(self.changed), 'change')} would be made"
            return f"{would}; then {left}" if left else would
        if left:
            done = "installed" if self.changed else "nothing to change on this node"
            return f"{done}, NOT in force: {left}" if present else f"NOT wholly uninstalled: {left}"
        if self.changed:
            return f"{wanted.value}: {system}"
        return (
            f"nothing to change: {system} is in force"
            if present
            else f"nothing to do: {system} is not installed here"
        )


def run_items(
    items: Sequence[Item], wanted: Wanted, state_dir: Path | None, echo: Echo, dry_run: bool = False
) -> Outcome:
    """Bring all items where they are wanted in their order, from the last one where they are to go.

    A dry run shows each difference and changes nothing. One installer of a node runs at a time;
    without `state_dir` nothing is on this node. Raises InstallError that names the first to fail.
    """
    outcome, blocker = Outcome(), ""  # the first item that this run leaves: the others wait for it
    alone = files.lock_installation(state_dir) if state_dir and items and not dry_run else None
    with alone or nullcontext():
        for item in items if wanted is Wanted.PRESENT else items[::-1]:
            try:
                lines = item.show(wanted)
                if lines and blocker:
                    echo(f"as it is: {item.title}, because of {blocker}")
                elif lines:
                    outcome.changed.append(item.title)
                    _change(item, wanted, lines, echo, dry_run)
                if left := item.remainder(wanted):
                    outcome.remainders.append(left)
                    blocker = blocker or item.title
            except InstallError as fault:
                why = str(fault)
                named = why if item.title in why else f"{item.title}: {why}"
                raise InstallError(named) from fault
    return outcome


def _change(item: Item, wanted: Wanted, lines: list[str], echo: Echo, dry_run: bool) -> None:
    """Show what would change, or change it and read it back; raise InstallError."""
    if dry_run:
        for line in (item.title, *lines):
            echo(line)
        return
    item.write(wanted)
    if still := item.show(wanted):
        raise InstallError(f"it does not hold what was written ({still[0].strip()}); look at it")
    echo(f"{'done' if wanted is Wanted.PRESENT else 'removed'}: {item.title}")
