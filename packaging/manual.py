# SPDX-License-Identifier: Apache-2.0
"""Write man pages and completions for shells: `python packaging/manual.py FOLDER`.

FOLDER stands for /usr/share. One page a program and a command (section 1, of daemons 8), and
gpulock.conf(5). Options, commands and settings come from the code's own tables, so that none is
forgotten. The pages use the man(7) macros of any troff. What a shell completes it asks the program.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import click
from click.shell_completion import get_completion_class
from gpulock_exporter.app.program import exporter_parser

from gpulock import __version__
from gpulock.cli import NODE_BROKEN, REFUSED, command_group
from gpulock.cli.admin.items import UNFINISHED
from gpulock.cli.claims.run import NOT_EXECUTABLE, NOT_FOUND
from gpulock.daemon.app import daemon_parser
from gpulock.node.setting_keys import CHOICE, KEYS, TEXT
from gpulock.node.settings_file import DEFAULT_PATH

USER, FILE, DAEMON = 1, 5, 8  # sections
ENDS: Final = (
    ("gpulock", USER),
    ("gpulockd", DAEMON),
    ("gpulock-exporter", DAEMON),
    ("gpulock.conf", FILE),
)
COLUMNS: Final = 78
LONG: Final = 200  # characters of a command's first sentence
CODES: Final = (
    ("0", "It was done, or a signal ended the daemon."),
    (
        str(REFUSED),
        "It was refused, there is nothing of what was asked for, or doctor found a fault.",
    ),
    ("2", "The arguments are invalid."),
    (str(NODE_BROKEN), "The node, its driver or its settings are at fault."),
    (str(UNFINISHED), "install, uninstall: a person has to do the rest, which is said."),
    (str(NOT_EXECUTABLE), "run: COMMAND cannot be executed."),
    (str(NOT_FOUND), "run: COMMAND is not there. Any other code of run is COMMAND's own."),
    ("130", "Ctrl-C, as a shell tells it: SIGINT ended the command."),
)
FILES: Final = (
    (DEFAULT_PATH, "The settings of the node."),
    ("/run/gpulock", "LOCK_DIR: a folder for each GPU that is held, with its owner."),
    ("/run/gpulock.claims", "The record of each claim, and the gate."),
    ("/var/lib/gpulock", "STATE_DIR: quarantine, reserves, history."),
    ("/run/gpulock-exporter", "The exporter's last sample."),
)
COMPLETIONS: Final = (
    ("bash", "bash-completion/completions/gpulock"),
    ("zsh", "zsh/site-functions/_gpulock"),  # of Fedora and its like
    ("zsh", "zsh/vendor-completions/_gpulock"),  # of Debian and its like
    ("fish", "fish/vendor_completions.d/gpulock.fish"),
)


class Page(NamedTuple):
    """A page: its name, section, one line on it, and its body in troff."""

    name: str
    section: int
    what: str
    body: tuple[str, ...]


def escape(text: str) -> str:
    r"""Return a line as troff prints it: no macro, `\\` and `-` as they are."""
    shown = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{shown}" if shown[:1] in {".", "'"} else shown


def entries(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a list of terms, each with what it means."""
    for term, meaning in pairs:
        yield from (".TP", f".B {escape(term)}", *map(escape, meaning.split("\n")))


def section(title: str, body: Iterable[str]) -> tuple[str, ...]:
    """Return a section, nothing where it is empty."""
    lines = tuple(body)
    return (f".SH {title}", *lines) if lines else ()


def command_pages(command: click.Command, context: click.Context) -> Iterator[Page]:
    """Yield the page of a command, and those of the commands below it."""
    title, what = context.command_path, command.get_short_help_str(LONG).rstrip(".")
    yield program_page(title.replace(" ", "-"), USER, what, command.get_help(context))
    if not isinstance(command, click.Group):
        return
    for name in command.list_commands(context):
        if below := command.get_command(context, name):
            inner = click.Context(below, info_name=name, parent=context)
            yield from command_pages(below, inner)


def program_page(name: str, number: int, what: str, text: str) -> Page:
    """Return the page of a program or command, by its own help."""
    body = section("DESCRIPTION", (".nf", *map(escape, text.strip().splitlines()), ".fi"))
    ends = (*section("EXIT STATUS", entries(CODES)), *section("FILES", entries(FILES)))
    return Page(name, number, what, (*body, *ends))


def setting_entry(key: tuple[str, str, str, str]) -> tuple[str, str]:
    """Return a setting and what it means, with its kind and its default."""
    name, kind, default, meaning = key
    first = default.partition("|")[0] if kind == CHOICE else default
    kinds = f"One of: {default.replace('|', ', ')}" if kind == CHOICE else f"Value: {kind}"
    shown = "" if kind == TEXT else f"{kinds}. "
    return name, f"{meaning[:1].upper()}{meaning[1:]}.\n{shown}Default: {first or 'empty'}."


def settings_page() -> Page:
    """Return gpulock.conf(5)."""
    rules = (
        "Each line is KEY=VALUE. A line that begins with # is a comment. The file must belong to"
        " root and be writable by no other user.",
        "What it does not name has its default. The environment configures nothing."
        " gpulock config shows every setting; gpulock config \\-\\-check FILE checks a file.",
    )
    return Page(
        "gpulock.conf",
        FILE,
        "settings of gpulock on a node",
        (
            *section("SYNOPSIS", (f".B {DEFAULT_PATH}",)),
            *section("DESCRIPTION", [line for rule in rules for line in (".PP", rule)]),
            *section("SETTINGS", entries(map(setting_entry, KEYS))),
        ),
    )


def all_pages() -> list[Page]:
    """Return every page."""
    settings = {**command_group.context_settings, "terminal_width": COLUMNS}
    top = click.Context(command_group, info_name="gpulock", **settings)
    exporter = "tell Prometheus what each GPU does and which job holds it"
    daemon = "free what dead owners hold, and keep a node's GPUs"
    services = (
        ("gpulockd", daemon, daemon_parser().format_help()),
        ("gpulock-exporter", exporter, exporter_parser().format_help()),
    )
    return [
        *command_pages(command_group, top),
        *(program_page(name, DAEMON, what, text) for name, what, text in services),
        settings_page(),
    ]


def render(page: Page) -> str:
    """Return a page as troff reads it; the programs and gpulock.conf(5) are named at its end."""
    head = f'.TH {escape(page.name).upper()} {page.section} "" "gpulock {__version__}" gpulock'
    name = f"{escape(page.name)} \\- {escape(page.what)}"
    others = [one for one in ENDS if one != (page.name, page.section)]
    see = [f".BR {escape(one)} ({number})," for one, number in others]
    return "\n".join(
        [
            head,
            ".SH NAME",
            name,
            *page.body,
            *section("SEE ALSO", [*see[:-1], see[-1].rstrip(",")]),
            "",
        ]
    )


def write_pages(folder: Path) -> list[Path]:
    """Write all pages as FOLDER/man/manN/NAME.N; return their paths."""
    found: list[Path] = []
    for page in all_pages():
        place = folder / f"man/man{page.section}" / f"{page.name}.{page.section}"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(render(page))
        found.append(place)
    return found


def write_completions(folder: Path) -> None:
    """Write what completes `gpulock` in each shell where it looks below FOLDER."""
    for shell, place in COMPLETIONS:
        kind = get_completion_class(shell)
        assert kind is not None
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(kind(command_group, {}, "gpulock", "_GPULOCK_COMPLETE").source())


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
    write_completions(Path(sys.argv[1]))
