# SPDX-License-Identifier: Apache-2.0
"""The man pages name every command, option and setting, in troff that a reader sees as meant."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gpulock.cli import command_group
from gpulock.node.setting_keys import KEYS
from gpulock.simulate.node import write_simulated_node

PACKAGING = Path(__file__).parents[3] / "packaging"
MACROS = {"TH", "SH", "PP", "TP", "B", "BR", "nf", "fi"}


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder to which everything was written as `make man` does."""
    folder, program = tmp_path_factory.mktemp("share"), str(PACKAGING / "manual.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [program, str(folder)])
        runpy.run_path(program, run_name="__main__")
    return folder


@pytest.fixture(scope="module")
def pages(share: Path) -> dict[str, str]:
    """Every page by the name of its file."""
    return {path.name: path.read_text() for path in share.glob("man/man*/*")}


def commands(group: click.Group, path: str) -> dict[str, click.Command]:
    """Return every command below a group by the name of its page."""
    found: dict[str, click.Command] = {path: group}
    with click.Context(group) as context:
        for name in group.list_commands(context):
            one = group.get_command(context, name)
            assert one is not None
            inner = f"{path}-{name}"
            found |= commands(one, inner) if isinstance(one, click.Group) else {inner: one}
    return found


def test_every_command_has_a_page_with_every_option_and_every_setting_is_told(
    pages: dict[str, str],
) -> None:
    for name, command in commands(command_group, "gpulock").items():
        page = pages[f"{name}.1"].replace("\\-", "-")
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert all(word in page for word in option.opts), f"{option.name} of {name}"
    for name, _, _, meaning in KEYS:
        assert f".B {name}\n{meaning[0].upper()}" in pages["gpulock.conf.5"]
    assert {"gpulockd.8", "gpulock-exporter.8"} <= set(pages)
    for name, page in pages.items():
        assert (".SH EXIT STATUS" in page) is not name.endswith(".5")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("why", "job", "4711"), 1),
        (("run", "-n", "1", "--", "/nonexistent"), 127),
        (("run", "-n", "1", "--", "/etc/passwd"), 126),
        (("status", "--nonsense"), 2),
    ],
)
def test_the_exit_codes_of_the_pages_are_those_of_the_commands(
    pages: dict[str, str], tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    config = write_simulated_node(tmp_path / "node", "workstation").config

    done = CliRunner().invoke(command_group, ["--config", str(config), *words])

    assert done.exit_code == code, done.output
    told = pages["gpulock.1"].partition(".SH EXIT STATUS\n")[2].partition(".SH")[0]
    assert str(code) in re.findall(r"^\.B (\d+)$", told, flags=re.MULTILINE)


def test_no_text_is_taken_for_a_macro(pages: dict[str, str]) -> None:
    for name, page in pages.items():
        for line in page.splitlines():
            assert not line.startswith("'"), name
            assert not line.startswith(".") or line[1:].split()[0] in MACROS, f"{name}: {line}"


def test_each_shell_gets_a_completion_where_it_looks(share: Path) -> None:
    bash = share / "bash-completion/completions/gpulock"
    subprocess.run(["bash", "-n", bash], check=True)
    fish = (share / "fish/vendor_completions.d/gpulock.fish").read_text()
    assert "_GPULOCK_COMPLETE=fish_complete" in fish
    for folder in ("site-functions", "vendor-completions"):  # Fedora's, Debian's
        assert (share / f"zsh/{folder}/_gpulock").read_text().startswith("#compdef gpulock")
