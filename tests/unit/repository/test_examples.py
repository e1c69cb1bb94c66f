# SPDX-License-Identifier: Apache-2.0
"""The examples of README and pages: each command is one, and README's print what it says."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import click
import pytest
import yaml

from gpulock.cli import command_group
from gpulock.node.procfs import Proc
from gpulock.simulate.presets import PRESETS
from tests.demo.__main__ import demo_command
from tests.support.cli_site import Site
from tests.support.faults import returning
from tests.support.runner import command_runner
from tests.unit.repository.test_docs import ROOT, documents, name_of

README: Final = ROOT / "README.md"
EXAMPLES: Final = ROOT / "docs/examples"
FENCED: Final = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE: Final = re.compile(
    r"`(gpulock [a-z]+(?:\s[^`]*)?)`"
)  # not `gpulock quarantine: GPU`, a message
COMMAND: Final = re.compile(r"^(?:\.venv/bin/)?(gpulock [a-z].*?)(?:  +.*)?(?:; .*)?$")
ELSEWHERE: Final = {"gpulock status --cluster": "tests/unit/cli: it needs a Prometheus"}


@cache
def readme_blocks() -> dict[str, str]:
    """Return the text of each fenced block of README by its first line."""
    return {text.partition("\n")[0]: text for text in FENCED.findall(README.read_text())}


def block_commands(text: str) -> Iterator[str]:
    """Yield the commands of gpulock in a block, without what is said about them."""
    for line in text.replace("\\\n", " ").splitlines():
        if found := COMMAND.match(line.strip().removeprefix("$ ").removeprefix("sudo ")):
            yield found[1].split(" # ")[0].strip()


def block(first: str) -> str:
    """Return README's block that begins with these words."""
    (found,) = [text for text in readme_blocks().values() if text.startswith(first)]
    return found


def find_command(words: list[str]) -> tuple[click.Command, click.Context, list[str]]:
    """Return the command that the words name, and the words that are left."""
    command: click.Command = command_group
    context = click.Context(command_group, info_name="gpulock")
    while isinstance(command, click.Group) and words:
        found = command.get_command(context, words[0])
        if words[0] == "...":  # any of them: the one with the most options
            others = [command.get_command(context, one) for one in command.list_commands(context)]
            found = max(filter(None, others), key=lambda one: len(one.params))
        assert found is not None, f"gpulock has no command {words[0]}"
        context = click.Context(found, parent=context, info_name=words[0])
        command, words = found, words[1:]
    return command, context, words


@pytest.mark.parametrize("page", documents(), ids=name_of)
def test_each_command_in_a_block_is_understood(page: Path) -> None:
    for text in FENCED.findall(page.read_text()):
        for line in block_commands(text):
            command, context, words = find_command(shlex.split(line)[1:])
            try:
                command.make_context(context.info_name, words, parent=context.parent)
            except click.UsageError as fault:
                pytest.fail(f"{line}: {fault.format_message()}")


@pytest.mark.parametrize("page", documents(), ids=name_of)
def test_each_command_and_option_in_a_sentence_is_there(page: Path) -> None:
    for line in INLINE.findall(re.sub(FENCED, "", page.read_text())):
        own = line.replace("\n", " ").split(" -- ")[0]
        command, _, words = find_command(own.split()[1:])
        known = {option for one in command.params for option in one.opts} | {"--help", "-h"}
        used = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= known, line


@pytest.mark.slow
def test_the_demo_prints_what_readme_shows() -> None:
    shown = command_runner().invoke(demo_command, [])
    assert shown.exit_code == 0, shown.output
    printed = [
        re.sub(r"\b(root|alice|\w+)(?= +gpu\.q)", "USER", one) for one in squeeze(shown.output)
    ]
    wanted = [
        re.sub(r"\balice(?= +gpu\.q)", "USER", one) for one in squeeze(block("1. A job asks"))
    ]

    parts = "\n".join(wanted).split("\n...\n")
    assert len(parts) > 1
    rest = "\n".join(printed)
    for part in parts:
        before, found, rest = rest.partition(part.strip("\n"))
        assert found, f"not printed after what comes before it:\n{part}\n--- but\n{before}"


def squeeze(text: str) -> list[str]:
    """Return lines without the widths of columns, and held for no time: a machine may be busy."""
    lines = text.strip().splitlines()
    return [re.sub(r"\b[0-9]+s\b", "0s", " ".join(line.split())) for line in lines]


def test_readmes_daily_commands_work_on_a_node_with_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of this machine's processes, which may be 25,000, each of five looks would read all
    own = {os.getpid(): os.stat("/proc/self").st_ino}
    monkeypatch.setattr(Proc, "inodes", returning(own))
    site = Site(tmp_path)
    site.hold(0, token="one", job_id="12", task_id="7")
    site.hold(1, token="two", job_id="12", task_id="")
    for line in block_commands(block("gpulock status")):
        if not any(line.startswith(other) for other in ELSEWHERE):
            done = site.call(*shlex.split(line)[1:])
            assert done.exit_code == 0, f"{line}: {done.output}{done.stderr}"
    for option in ("--free", "--json"):
        assert site.call("status", option).exit_code == 0
    assert "no gpulock-exporter runs" in site.call("status", "--idle", "30m").stderr


def test_readmes_simulated_node_is_made_and_shown(tmp_path: Path) -> None:
    text = README.read_text()
    made = re.search(r"`\.venv/bin/gpulock (simulate /tmp/node [^`]*)`", text)
    shown = re.search(r"`\.venv/bin/gpulock (--config /tmp/node/gpulock\.conf status)`", text)
    assert made and shown
    place = str(tmp_path / "node")
    for line in (made[1], shown[1]):
        words = [word.replace("/tmp/node", place) for word in line.split()]
        done = command_runner().invoke(command_group, words)
        assert done.exit_code == 0, done.output
    assert "8 GPUs: 8 free" in done.output
    assert words and "dgx-h200" in PRESETS


# --- docs/examples: what needs no scheduler and no Prometheus runs here ---------------------------


def test_a_workstations_command_runs_with_the_gpu_that_it_says(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.set((EXAMPLES / "workstation/gpulock.conf").read_text())
    done = site.run("run", "-n", "1", "--wait", "--", str(EXAMPLES / "workstation/train.sh"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" has GPUs 0\n")
    assert site.call("status", "--json").exit_code == 0


def test_grafana_is_told_a_source_of_the_kind_that_the_dashboards_ask() -> None:
    told = EXAMPLES / "prometheus/grafana/datasources/gpulock.yml"
    sources = yaml.safe_load(told.read_text())["datasources"]
    (kind,) = {source["type"] for source in sources}
    boards = sorted((ROOT / "exporter/dashboards").glob("*.json"))
    assert len(boards) == 3
    for path in boards:
        board = json.loads(path.read_text())
        (chosen,) = [one for one in board["templating"]["list"] if one["type"] == "datasource"]
        assert chosen["query"] == kind
        used = {panel["datasource"]["uid"] for panel in board["panels"] if "datasource" in panel}
        assert used <= {f"${{{chosen['name']}}}"}
