# SPDX-License-Identifier: Apache-2.0
"""The owner record: what is written is read back, what is strange is not believed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulock.store import kv, owner
from gpulock.store.owner import LIST, NUMBER, REAL, TEXT, TYPES, Owner
from tests.support.trees import BOOT, record

WORDS = st.text(alphabet=st.characters(codec="utf-8"), min_size=1).filter(kv.is_single_line)
IDS = st.text(alphabet="0123456789abcdef:.gic", min_size=1)
STRATEGIES: dict[object, st.SearchStrategy[object]] = {
    TEXT: WORDS,
    NUMBER: st.integers(),
    REAL: st.integers(0, 10**12).map(lambda n: n / 1000),
    LIST: st.lists(IDS, min_size=1).map(tuple),
}
ANY = st.fixed_dictionaries({key: STRATEGIES[kind] for key, kind in TYPES.items()})


def fields(one: Owner) -> dict[str, object]:
    return {key: getattr(one, key) for key in owner.TYPES}


@pytest.mark.slow
@given(ANY)
def test_every_record_reads_back_as_it_was_written(values: dict[str, object]) -> None:
    assert fields(owner.parse_owner(owner.encode_owner(Owner(**values)))) == values


@given(st.text())
def test_any_text_is_either_a_record_or_malformed(text: str) -> None:
    for candidate in (text, f"{owner.VERSION_LINE}\n{text}"):
        try:
            owner.parse_owner(candidate)
        except kv.MalformedError:
            continue
        pytest.fail(f"{candidate!r} was believed")  # it cannot have all required keys


def test_the_list_of_devices_is_the_last_line_so_it_marks_the_end() -> None:
    assert list(TYPES)[-1] == "devices"
    values = {key: "x" for key, kind in TYPES.items() if kind is TEXT}
    assert owner.encode_owner(record(**values)).splitlines()[-1].startswith("devices=")


def test_a_record_that_is_cut_anywhere_is_not_believed() -> None:
    text = owner.encode_owner(record(uuids=("GPU-1",), minors=("3",), devices=("a", "b")))
    for length in range(len(text)):
        with pytest.raises(kv.MalformedError):
            owner.parse_owner(text[:length])


@pytest.mark.parametrize("key", ["scheduler", "node", "job_id", "token", "boot_id", "devices"])
def test_a_record_without_a_key_field_is_malformed_and_an_unknown_key_is_ignored(key: str) -> None:
    text = (
        f"{owner.VERSION_LINE}\ncolour=blue\n{owner.encode_owner(record()).partition(chr(10))[2]}"
    )
    assert fields(owner.parse_owner(text)) == fields(record())
    lines = [line for line in text.splitlines() if not line.startswith(f"{key}=")]
    with pytest.raises(kv.MalformedError, match=key):
        owner.parse_owner("\n".join([*lines, ""]))


def test_the_key_tells_two_slurmds_of_one_machine_apart_and_not_its_names() -> None:
    one = record()
    assert one.copy(node="another", start=2).key() == one.key()
    assert one.copy(slurmd="another").key() != one.key()


def test_a_part_of_a_record_tells_its_own_devices() -> None:
    one = record(devices=("a", "b"), uuids=("GPU-a", "GPU-b"), minors=("0", "1"))
    left = one.of_devices(["b"])
    assert (left.devices, left.uuids, left.minors) == (("b",), ("GPU-b",), ("1",))


def test_what_an_administrator_calls_a_health_check_gives_way_to_nobody() -> None:
    assert not record(scheduler="admin", comment=owner.HEALTH_COMMENT).gives_way()
    assert record(user=owner.HEALTH_USER, comment=owner.HEALTH_COMMENT).gives_way()


def test_a_record_whose_end_was_never_written_is_not_believed() -> None:
    """A power cut leaves a file of the right length, in which the last blocks are zeros."""
    text = owner.encode_owner(record(uuids=("GPU-1",), minors=("3",)))
    for length in range(len(text)):
        with pytest.raises(kv.MalformedError):
            owner.parse_owner(text[:length] + "\0" * (len(text) - length))
    with pytest.raises(kv.MalformedError, match="cut short"):
        owner.parse_owner(text.replace("user=alice", "user=al\0\0\0"))


def test_a_number_longer_than_python_reads_is_malformed() -> None:
    with pytest.raises(kv.MalformedError):
        owner.parse_owner(owner.encode_owner(record(pid=0)) + "pid=" + "9" * 5000 + "\n")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400"])
def test_a_claim_time_that_is_no_time_does_no_harm(value: str) -> None:
    text = owner.encode_owner(record()) + f"claimed_at={value}\nclaimed_boottime={value}\n"
    assert owner.parse_owner(owner.encode_owner(owner.parse_owner(text))).token == record().token


def test_a_hostile_name_stays_on_its_line() -> None:
    name = "uid=0,scheduler=admin # \u2028 token=x"
    assert owner.parse_owner(owner.encode_owner(record(user=name))).user == name
    assert owner.parse_owner(owner.encode_owner(record(user=name))).uid == 1000


def test_a_field_that_does_not_exist_is_a_mistake_of_the_program() -> None:
    with pytest.raises(TypeError):
        record(colour="blue")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "12"),
        ({"task_id": "3"}, "12.3"),
        ({"task_id": "1"}, "12.1"),
        ({"scheduler": "process", "job_id": "4711"}, "pid 4711"),
        ({"scheduler": "admin", "boot_id": BOOT}, "reserve"),
    ],
)
def test_people_read_a_job_as_they_name_it(changes: dict[str, object], said: str) -> None:
    assert record(**changes).job() == said


def test_an_anchor_that_was_forgotten_since_it_was_listed_is_none(tmp_path: Path) -> None:
    assert owner.read_anchor(str(tmp_path / "65401")) is None
