# SPDX-License-Identifier: Apache-2.0
"""execd's packed job: read by the one layout that fits the file, an answer or a refusal."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from gpulock.sge import spooled_job
from gpulock.sge.spooled_job import (
    BITS,
    LIST,
    STRING,
    CullReader,
    LayoutError,
    SgeJob,
    parse_spooled_job,
)
from tests.support import execd, packed_job
from tests.support.packed_job import (
    HOST,
    JOB,
    JOBS,
    NO,
    YES,
    Ask,
    Grant,
    Packer,
    ResourceRequest,
    ocs_job,
)

SGE = Path(__file__).parents[2] / "support/data/sge-8.1.9"
OLD = {name: (SGE / f"{name}.job").read_bytes() for name in ("parallel", "array")}
NEW = packed_job.REAL
SON = "8.1.9"
RELEASES = (SON, *sorted(JOBS))
HEAD = b"qstat_l_requests\0"


def packed(*asks: Ask, **about: object) -> bytes:
    """Return a job as 8.1.9 spools it."""
    resources = tuple(ResourceRequest(a.name, a.value, str(a.value), a.flag) for a in asks)
    fields: dict[str, object] = {"job_id": 12, "command": ("/bin/true",), **about}
    return execd.pack_simulated_job(execd.SimulatedJob(resources=resources, **fields))  # type: ignore[arg-type]


def spooled(
    release: str, *asks: Ask, grants: tuple[Grant, ...] = (), owner: str = "alice"
) -> bytes:
    """Return a job as a release spools it."""
    if release == SON:
        return packed(*asks, owner=owner)
    return ocs_job(asks, grants, release, owner=owner)


SAMPLES = [
    *OLD.values(),
    *NEW.values(),
    *(spooled(release, Ask("gpu", 2), grants=(Grant("gpu", 2),)) for release in RELEASES),
]
each_release = pytest.mark.parametrize("release", RELEASES)


def survives(data: bytes) -> None:
    """Only a job or a LayoutError may come of any bytes."""
    try:
        job = parse_spooled_job(data)
    except LayoutError:
        return
    assert isinstance(job, SgeJob)
    assert all(isinstance(value, float) for _, value, _ in job.requests)
    assert all(isinstance(amount, float) for _, amount, _, _ in job.granted or ())


def is_believed(data: bytes) -> bool:
    try:
        parse_spooled_job(data)
    except LayoutError:
        return False
    return True


# --- what the files say ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "number", "requests"),
    [
        ("parallel", 4, [("gpu", 2.0, YES), ("h_rt", 100.0, NO), ("gpuj", 1.0, JOB)]),
        ("array", 5, [("gpu", 1.0, YES)]),
    ],
)
def test_the_real_files_of_8_1_9_say_what_was_asked_for(
    name: str, number: int, requests: list[tuple[str, float, int]]
) -> None:
    job = parse_spooled_job(OLD[name])
    assert (job.number, job.owner) == (number, "sgealice")
    assert (job.requests, job.granted) == (requests, None)


@pytest.mark.parametrize(
    ("number", "request_", "granted"),
    [
        (12, ("gpu", 2.0, YES), ("gpu", 2.0, [], "ocs1")),
        (13, ("card", 2.0, YES), ("card", 2.0, [("0", 1), ("1", 1)], "ocs1")),
        (14, ("card", 1.0, YES), ("card", 2.0, [("2", 1), ("3", 1)], "ocs1")),
        (15, ("gpuj", 3.0, JOB), ("gpuj", 3.0, [], "ocs1")),
        (16, ("gpuh", 2.0, HOST), ("gpuh", 2.0, [], "ocs1")),
        (17, ("gpu", 1.0, YES), ("gpu", 1.0, [], "ocs1")),
    ],
)
def test_the_real_files_of_9_1_5_say_what_was_granted(
    number: int, request_: tuple[str, float, int], granted: object
) -> None:
    job = parse_spooled_job(NEW[number])
    assert (job.number, job.owner, job.uid) == (number, "alice", 2701)
    assert (job.requests, job.granted) == ([request_], [granted])


@each_release
def test_each_release_has_a_layout(release: str) -> None:
    grants = (Grant("gpu", 3), Grant("gpu", 4, "other"), Grant("card", 1, ids=(("0", 1),)))
    asks = (Ask("gpu", 1), Ask("gpu", 2, JOB), Ask("h_rt", 9, NO))
    job = parse_spooled_job(spooled(release, *asks, grants=grants))
    assert (job.number, job.owner) == (12, "alice")
    assert job.requests == [("gpu", 1.0, YES), ("gpu", 2.0, JOB), ("h_rt", 9.0, NO)]
    known = None if release == SON else [(g.name, g.amount, list(g.ids), g.host) for g in grants]
    assert job.granted == known


def test_names_that_are_no_text_survive() -> None:
    for sample, name in ((OLD["array"], b"sgealice\0"), (NEW[12], b"alice\0")):
        data = sample.replace(name, name[:-2] + b"\xff\0")
        assert parse_spooled_job(data).owner == f"{name[:-2].decode()}\udcff"


@each_release
def test_bytes_of_the_user_that_look_like_a_request_are_not_one(release: str) -> None:
    """A whole resource list of another job, as a text of this one's."""
    for sample in (OLD["parallel"], NEW[12]):
        text = sample[sample.index(HEAD) - 8 :].replace(b"\0", b"\x01").decode("latin-1")
        for asks in ((), (Ask("gpu", 1),)):
            job = parse_spooled_job(spooled(release, *asks, owner=text))
            assert job.requests == [(a.name, a.value, a.flag) for a in asks]


# --- what fits no layout --------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0x10010000, 0x10020001, 0x10021001, 0x10022000, 0, 0xFFFFFFFF])
@pytest.mark.parametrize("sample", [OLD["parallel"], NEW[12]])
def test_another_version_is_refused(sample: bytes, version: int) -> None:
    with pytest.raises(LayoutError, match="another version"):
        parse_spooled_job(sample[:4] + version.to_bytes(4, "big") + sample[8:])


@each_release
def test_a_layout_must_end_with_the_file(release: str) -> None:
    whole = spooled(release, Ask("gpu", 2), grants=(Grant("gpu", 2),))
    for tail in (b"\0", b"\0" * 4, b"\0" * 8):
        assert not is_believed(whole + tail)
    for end in range(0, len(whole), 7):
        assert not is_believed(whole[:end])


@pytest.mark.slow
@pytest.mark.parametrize("sample", [*OLD.values(), NEW[12], NEW[13]])
def test_a_file_cut_short_is_never_a_smaller_request(sample: bytes) -> None:
    for end in range(len(sample)):
        assert not is_believed(sample[:end])


def test_a_file_that_fits_two_layouts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooled_job, "LAYOUTS", spooled_job.LAYOUTS * 2)
    for sample in SAMPLES:
        with pytest.raises(LayoutError, match="two layouts"):
            parse_spooled_job(sample)


def test_another_number_of_fields_is_refused() -> None:
    whole = spooled(SON)
    at = whole.index((85).to_bytes(4, "big"))
    with pytest.raises(LayoutError, match="more or fewer fields"):
        parse_spooled_job(whole[: at + 3] + b"\x56" + whole[at + 4 :])


@pytest.mark.parametrize(("sample", "kind"), [(OLD["parallel"], 15), (NEW[12], 11)])
def test_a_list_with_other_fields_is_not_guessed(sample: bytes, kind: int) -> None:
    """The first field of the requests is a host's name instead of a string."""
    at = sample.index(HEAD) + len(HEAD) + kind
    assert sample[at] == STRING
    with pytest.raises(LayoutError, match="a list of fields HSUSDUU"):
        parse_spooled_job(sample[:at] + bytes([spooled_job.HOST]) + sample[at + 1 :])


@pytest.mark.parametrize(
    ("sample", "begin", "fields", "end"), [(OLD["parallel"], 4, 15, 0), (NEW[12], 0, 16, 4)]
)
def test_an_element_with_fields_of_its_own_is_refused(
    sample: bytes, begin: int, fields: int, end: int
) -> None:
    """A list's descriptor is what its elements are read by: no element brings any, not even it."""
    begin += sample.index(HEAD) + len(HEAD)
    descriptor = sample[begin : begin + 4 + 8 * fields]
    at = begin + len(descriptor) + end
    assert sample[at : at + 4] == b"\0\0\0\2"
    one_string = b"\0\0\0\1" + (900).to_bytes(4, "big") + b"\0\0\0\x08"
    for own in (b"", one_string, descriptor):
        assert not is_believed(sample[:at] + b"\0\0\0\1" + own + sample[at + 4 :])


def test_a_job_that_brings_its_own_fields_is_read_where_they_are_the_layouts() -> None:
    whole, letters = spooled("9.1", Ask("gpu", 2), grants=(Grant("gpu", 2),)), JOBS["9.1"]
    for fields, believed in ((letters, True), (letters[:-1] + "S", False), (letters[:-1], False)):
        own = b"\0\0\0\1" + Packer("9.1").descriptor(fields, 6950)
        assert is_believed(whole[:9] + own + whole[13:]) is believed


# --- any bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [0, 1, 4, 5, 7, 14, 255])
def test_a_type_that_nobody_knows_is_refused(kind: int) -> None:
    with pytest.raises(LayoutError, match=f"type {kind}"):
        CullReader(bytes(8), BITS).value(kind)


@pytest.mark.parametrize("count", [0, 201, 1 << 31])
def test_a_list_of_no_fields_or_of_too_many_is_refused(count: int) -> None:
    with pytest.raises(LayoutError, match=f"a descriptor of {count} fields"):
        CullReader(count.to_bytes(4, "big") + bytes(2000), BITS).descriptor()


def test_lists_within_lists_deeper_than_python_goes_are_no_job() -> None:
    one = b"\0\0\0\1" * 2 + bytes(5) + b"\0\0\0\1" + bytes(4) + b"\0\0\0\x09" + bytes(8)
    assert not is_believed(b"\0\0\0\0\x10\2\0\0" + bytes(17) + one * 5000)


@pytest.mark.slow
@pytest.mark.giant
@pytest.mark.parametrize("sample", [*OLD.values(), NEW[12], NEW[13]])
def test_every_single_byte_may_be_wrong(sample: bytes) -> None:
    for at in range(len(sample)):
        for value in (0, 1, 0xFF):
            survives(sample[:at] + bytes([value]) + sample[at + 1 :])


def test_a_field_that_takes_no_room_takes_no_time_and_no_memory() -> None:
    """200 references an element: 64 MiB of a list were 13 GB of nothing."""
    names = b"".join([b"\0\0\0\1\0\0\0\x0b"] * 200)
    head = b"\0\0\0\1" + (20_000).to_bytes(4, "big") + b"x\0" + bytes(4) + b"\0\0\0\xc8" + names
    data = head + bytes(8) * 20_000
    reader = CullReader(data, BITS)
    tracemalloc.start()
    try:
        reader.value(LIST)
        assert reader.at_end()
        assert tracemalloc.get_traced_memory()[1] < 16 * len(data)
    finally:
        tracemalloc.stop()
