# SPDX-License-Identifier: Apache-2.0
"""What any release of gpulock wrote, this one reads; and what this one writes, they read.

An earlier release ignores fields that it does not know. So it reads a file in which each of its
own lines stands as it wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import pytest

from gpulock import __version__
from gpulock.node.settings import parse_settings
from tests.support.faults import replace_text
from tests.support.formats import FIELDS, READERS, plain_value, read_formats, write_formats

RELEASES: Final = sorted((Path(__file__).parents[2] / "support/data/formats").glob("*.json"))
IDS: Final = [path.stem for path in RELEASES]
OPEN: Final = {  # each key is a device's or a claim's
    *("verdicts", "suspects", "cards", "events", "slurm-map", "sge-map", "sge-rsmap"),
    "history",  # JSON
    "settings",  # what it does not know is a fault that it tells
}
FILES: Final = {"finished": "exporter/finished/feedbeef", "exporter's inventory": "inventory"}
VERSIONED: Final = (
    *("owner.sge", "verdicts", "sample", "finished", "inventory", "task"),
    *("slurm-map", "sge-map", "cards", "request", "reply"),
)


def load_release(path: Path, root: Path) -> dict[str, Any]:
    """Lay the files of a release into a folder; return what was recorded of it."""
    recorded: dict[str, Any] = json.loads(path.read_text())
    for name, text in recorded["files"].items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return recorded


def find_lost_facts(before: Any, now: Any, where: str) -> Iterator[str]:
    """Yield each fact that is no longer told, or another one now."""
    old, new = [
        dict(enumerate(cast("list[object]", one))) if isinstance(one, list) else one
        for one in (before, now)
    ]
    if isinstance(old, dict) and isinstance(new, dict):
        found = cast("dict[object, object]", new)
        for key, value in cast("dict[object, object]", old).items():
            yield from find_lost_facts(value, found.get(key), f"{where} {key}")
    elif before != now:
        yield f"{where}: {before} is {now}"


def test_this_release_is_among_those_that_were_recorded() -> None:
    assert __version__ in IDS


@pytest.mark.parametrize("release", RELEASES, ids=IDS)
def test_the_files_of_a_release_say_what_they_said_to_it(release: Path, tmp_path: Path) -> None:
    recorded = load_release(release, tmp_path)

    found = read_formats(tmp_path)

    assert list(find_lost_facts(recorded["read"], found, release.stem)) == []


@pytest.mark.parametrize("release", RELEASES, ids=IDS)
def test_a_release_finds_each_of_its_lines_in_the_files_of_this_one(
    release: Path, tmp_path: Path
) -> None:
    files = json.loads(release.read_text())["files"]
    write_formats(tmp_path)

    for name, text in files.items():
        now = (tmp_path / name).read_text()
        assert now.split("\n", 1)[0].startswith(text.split("\n", 1)[0]) or name == "history"
        if name == "history":
            assert list(find_lost_facts(json.loads(text), json.loads(now), name)) == []
        else:
            assert [line for line in text.split("\n") if line not in now.split("\n")] == [], name


@pytest.mark.parametrize("release", RELEASES, ids=IDS)
def test_no_field_of_a_release_has_another_type_or_is_gone(release: Path) -> None:
    fields = json.loads(release.read_text())["fields"]

    for table in ("owner", "sample"):
        assert [row for row in fields[table] if row not in FIELDS[table]] == []


@pytest.mark.parametrize("release", RELEASES, ids=IDS)
def test_each_default_and_choice_of_a_release_is_still_one(release: Path) -> None:
    for name, kind, default in json.loads(release.read_text())["fields"]["settings"]:
        values = {"choice": default.split("|"), "yes|no": ["yes", "no"]}.get(kind, [default])
        for value in values:
            settings = parse_settings(f"{name}={value}\n", "/etc/gpulock/gpulock.conf")
            assert settings.faults == ()
            assert settings.given == {name: value}


@pytest.mark.parametrize("name", sorted(set(READERS) - OPEN))
def test_a_field_of_a_later_release_changes_nothing(name: str, tmp_path: Path) -> None:
    write_formats(tmp_path)
    said = plain_value(READERS[name](tmp_path))
    place = tmp_path / FILES.get(name, name)
    if place.is_dir():
        place = next(place.iterdir())
    head, _, rest = place.read_text().partition("\n")
    place.write_text(f"{head}\nfrom_later=1\n{rest}")

    found = plain_value(READERS[name](tmp_path))

    assert list(find_lost_facts(said, found, name)) == []


@pytest.mark.parametrize("name", VERSIONED)
def test_a_file_of_another_version_is_not_believed(name: str, tmp_path: Path) -> None:
    write_formats(tmp_path)
    place = tmp_path / FILES.get(name, name)
    head, _, rest = place.read_text().partition("\n")
    assert head.startswith("gpulock-") and head.endswith(" 1")
    place.write_text(f"{head[:-1]}2\n{rest}")

    try:
        found = READERS[name](tmp_path)
    except Exception as refusal:
        assert f"{head[:-1]}2" in str(refusal)
    else:
        assert not found


def test_a_history_of_another_version_is_not_believed(tmp_path: Path) -> None:
    write_formats(tmp_path)
    replace_text(tmp_path / "history", '"version":1', '"version":2')

    with pytest.raises(Exception, match="a record of version 2"):
        READERS["history"](tmp_path)
