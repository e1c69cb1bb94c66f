# SPDX-License-Identifier: Apache-2.0
"""`gpulock config`: every setting with the value in force, default, meaning and its source."""

from __future__ import annotations

import os
import shlex
import stat
import sys
from typing import cast

import click

from gpulock.cli.session import CommandRefusedError, Session, echo_note
from gpulock.install.doctor.check import FAULT
from gpulock.install.doctor.node import UNREADABLE, check_lock_dir, check_state_dir
from gpulock.install.setting_faults import find_setting_faults
from gpulock.node.setting_keys import CHOICE, COUNT, FLAG, KEYS, PATH, PLACES, SEAMS, TEXT
from gpulock.node.settings import Settings, parse_settings
from gpulock.node.settings_file import DEFAULT_PATH, check_file_owner, check_simulation_marker
from gpulock.store import atomic
from gpulock.text import table

CORRECT = "correct that line, or what it names"


@click.command()
@click.option("--check", metavar="FILE", help="Only check FILE; exit 1 if it is invalid.")
@click.pass_obj
def config_command(session: Session, check: str | None) -> None:
    """Show every setting of this node, or check a settings file."""
    if check is not None:
        number = validate_settings_file(check, session.config == DEFAULT_PATH)
        click.echo(f"{check}: right, {number} keys set")
        if not os.stat(check).st_mode & stat.S_IROTH:
            echo_note(UNREADABLE.format(check))
        return
    settings = session.settings()
    click.echo("\n".join(format_config_lines(settings, table.sentence_width(sys.stdout))))


def validate_settings_file(path: str, fixed: bool) -> int:
    """Return how many keys a right file sets; raise Refusal with its faults.

    It is to be a real node's where its folders are `fixed`.
    """
    caller, do = os.geteuid(), f"chown root {shlex.quote(path)}; chmod 644 {shlex.quote(path)}"
    try:
        check_file_owner(path, os.stat(path), caller)
        do = CORRECT
        settings = parse_settings(atomic.read_text(os.path.realpath(path)), path, fixed)
        if settings.simulation:
            check_simulation_marker(settings, caller)
    except ValueError as fault:
        raise CommandRefusedError(str(fault), do) from fault
    except OSError as fault:
        do = "make it readable" if isinstance(fault, PermissionError) else "name a settings file"
        raise CommandRefusedError(f"{path}: {fault.strerror}", do) from fault
    wrong = [*settings.faults, *(f"{path}: {fault}" for fault in find_setting_faults(settings))]
    if wrong:
        raise CommandRefusedError("; ".join(wrong), CORRECT)
    if caller == 0 or settings.simulation:  # as a hook runs
        for one in (*check_lock_dir(settings), *check_state_dir(settings)):
            if one.state == FAULT and not one.name:  # of a folder itself
                raise CommandRefusedError(f"{path}: {one.what}", one.do)
    return len(settings.given)


def format_config_lines(settings: Settings, width: int) -> list[str]:
    """Return for each key the value in force, its source and meaning; the file's stand out."""
    names = settings.given
    result = [f"# {settings.path}", *(f"# {fault}" for fault in settings.faults)]
    rows = [*KEYS, *(row for row in SEAMS if row[0] in names)]
    longest = max(len(name) for name, *_ in rows)
    below = " " * (longest + 2)
    for name, kind, default, meaning in rows:
        value = format_setting_value(getattr(settings, name.lower()))
        obeyed = name in names and (kind not in (CHOICE, FLAG) or names[name] == value)
        value = (names[name] if obeyed else value) or '""'
        usual = (default.partition("|")[0] if kind == CHOICE else default) or '""'
        source = "file, " if obeyed else "by other keys, " if value != usual else ""
        line = f"{name.ljust(longest)}  {value}  ({source}default{f' {usual}' if source else ''})"
        colour = "cyan" if obeyed else None
        result += [table.paint_text(one, colour) for one in table.wrap_sentence(line, width, below)]
        unit = default if kind == CHOICE else "" if kind in (TEXT, PATH, COUNT, PLACES) else kind
        text = f"{below}{meaning}{f' ({unit})' if unit else ''}"
        result += [click.style(line, dim=True) for line in table.wrap_sentence(text, width, below)]
    return result


def format_setting_value(value: object) -> str:
    """Return a value as it would stand in the file."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(map(str, cast("tuple[object, ...]", value)))
    return f"{value:g}" if isinstance(value, float) else str(value)
