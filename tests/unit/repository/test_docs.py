# SPDX-License-Identifier: Apache-2.0
"""The documents: what they link, cite and name is there, and each promise has its tests."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from gpulock.alloc.states import STATES
from gpulock.errors import KINDS
from gpulock.node.settings import parse_settings

ROOT = Path(__file__).resolve().parents[3]


@cache
def listed(*patterns: str) -> list[Path]:
    """List the files of the repository that match git's patterns."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--", *patterns],
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def documents() -> list[Path]:
    """List every page but the record of changes, which grows by single lines."""
    return [path for path in listed("*.md") if path.name != "CHANGELOG.md"]


def name_of(path: Path) -> str:
    """Name a file as the repository does."""
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", documents(), ids=name_of)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    inside = [link for link in links if "://" not in link]
    assert [link for link in inside if not (page.parent / link).exists()] == []


def test_tests_that_a_page_names_are_there() -> None:
    named = {
        found
        for page in documents()
        for found in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page.read_text())
    }
    there = {path: (ROOT / path).read_text() for path, _ in named if (ROOT / path).is_file()}
    assert [one for one in sorted(named) if f"\ndef {one[1]}(" not in there.get(one[0], "")] == []


@pytest.mark.parametrize(
    ("page", "section", "fewest"),
    [
        ("reliability", "The promises", 11),
        ("facts/inputs", "What a hook waits for", 16),
        ("facts/inputs", "What root reads", 60),
    ],
)
def test_each_promise_and_each_input_of_roots_names_its_tests(
    page: str, section: str, fewest: int
) -> None:
    table = (ROOT / f"docs/{page}.md").read_text().partition(f"## {section}\n")[2]
    lines = [line for line in table.partition("\n## ")[0].splitlines() if line[:1] == "|"]
    heads = [
        number + shift for number, one in enumerate(lines) for shift in (-1, 0) if one[:4] == "|---"
    ]
    rows = [line for number, line in enumerate(lines) if number not in heads]
    assert len(rows) >= fewest
    assert [row for row in rows if "::test_" not in row.rpartition(" | ")[2]] == []


def test_settings_in_code_blocks_are_read_as_pasted() -> None:
    shown = re.compile(r"^[A-Z][A-Z_]+=.*", re.MULTILINE)
    for page in documents():
        for block in re.findall(r"```\n(.*?)```", page.read_text(), flags=re.DOTALL):
            for line in shown.findall(block):
                assert parse_settings(line, name_of(page)).faults == (), line


def test_the_index_has_each_page_once_and_the_readme_names_it() -> None:
    index = ROOT / "docs/README.md"
    links = re.findall(r"^- \[[^]]+\]\(([^)]+)\): \S", index.read_text(), flags=re.MULTILINE)
    pages = listed("docs/*.md", "docs/facts/*.md", "docs/hardware/README.md")
    wanted = {*pages, ROOT / "exporter/README.md"} - {index}
    assert sorted((index.parent / link).resolve() for link in links) == sorted(wanted)
    assert "](docs/README.md)" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("word", [*STATES, *KINDS])
def test_each_state_and_each_kind_of_refusal_has_a_row(word: str) -> None:
    assert f"\n| `{word}` |" in (ROOT / "docs/troubleshooting.md").read_text()
