# SPDX-License-Identifier: Apache-2.0
"""What the exporter saw, once a second: the reader of its files, for the rest of gpulock.

Warm. Written by an ordinary user, so it is advice: it may quarantine, never free. `sample` is how
things stand, `finished/TOKEN` what is left of one claim. Both are a version line, `key=value`
lines, then a line for each device and each device of a claim:

    device <lock id> key=value ...
    token <token> <lock id> key=value ...
    lost <bus id> <since> <why>

The annotations of the classes are normative; times are CLOCK_BOOTTIME seconds unless they say
otherwise. What is not known is left out, never 0. Unknown lines and keys are ignored, and so is a
value that is not of its type: the rest of the file still counts.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpulock.store import atomic, kv

SAMPLE_LINE, FINISHED_LINE = "gpulock-sample 1", "gpulock-finished 1"
SAMPLE, FINISHED = "sample", "finished"  # names in the exporter's folder
LIMIT = 1 << 20  # bytes: 128 MIG instances, each claimed on its own, are 0.3 MB
FRESH = 10.0  # seconds; the exporter writes once in one
AHEAD = 1.0  # seconds that a sample may seem to be of the future: read while it was written
BUCKETS = 64  # of a claim; when they are full, two become one
MILLI = 1000
DEVICE_WORDS, TOKEN_WORDS = 2, 3  # of a line, before its pairs
LOST, LOST_WORDS = "lost", 3  # a card that does not answer, and the words before the reason
COUNT_DIGITS = 18  # of a whole number: no counter of a device has more
TOKEN_LENGTH = 64  # characters at most
TEXT, COUNT, REAL, LIST = "str", "int | None", "float | None", "tuple[int, ...]"  # of a field
EMPTY: dict[str, object] = {TEXT: "", LIST: ()}  # of another type: None


class DeviceSample:
    """One device; a value that is not known is None. `own` is the exporter's own memory."""

    uuid: str  # as NVML names it
    index: int | None  # number of the card in this boot
    looked: float | None  # when the driver last reported this device: the age of its values
    utilization: float | None  # share of time at work, of the last look
    memory_used: int | None  # bytes
    memory_total: int | None  # bytes
    coherent: int | None  # 1: the kernel puts its own pages into the card's memory
    power: float | None  # watts
    temperature: float | None  # degrees Celsius
    busy: float | None  # seconds at work, in this boot
    observed: float | None  # seconds of which it is known whether it was at work
    last_busy: float | None  # when it was last seen at work
    energy: float | None  # joules, in this boot
    processes: int | None  # processes that NVML lists
    listed: float | None  # when NVML listed them; who of these ended since is not known
    foreign: int | None  # of these, neither the owner's nor a service
    unseen: int | None  # of these, hidden: not known whose
    foreign_pids: tuple[int, ...]  # the first of the foreign ones
    uncorrected: int | None  # uncorrected ECC errors, in this boot
    recovery_action: int | None  # what the driver asks for, by nvml.h; 0: nothing
    remap_failure: int | None  # 1: a row of its memory could not be remapped
    pcie_width: int | None  # lanes of its PCIe link
    pcie_width_max: int | None  # most lanes that card and slot can have
    nvlink_active: int | None  # NVLinks that are up

    def __init__(self, values: dict[str, object], own: dict[str, str]) -> None:
        self.__dict__ = {**BLANK["device"], **values}
        self.own = own


class ClaimUsage:
    """What one device did for one claim; a value that is not known is None."""

    since: float | None  # the claim; its buckets begin here
    until: float | None  # the last look that counts for it
    busy: float | None  # seconds at work
    observed: float | None  # seconds of which it is known whether it was at work
    seen: float | None  # when it was last known whether it was at work
    idle: float | None  # observed seconds since it was last at work; true as of `seen`
    last_busy: float | None  # when it was last seen at work
    energy: float | None  # joules
    memory_peak: int | None  # bytes, the most that was seen in use
    foreign: float | None  # seconds in which foreign processes were seen beside it
    width: float | None  # seconds of a bucket
    used: tuple[int, ...]  # milliseconds at work in each bucket
    covered: tuple[int, ...]  # milliseconds observed in each bucket

    def __init__(self, values: dict[str, object]) -> None:
        self.__dict__ = {**BLANK["token"], **values}


class Sample:
    """A whole file: devices by lock id, accounts by token and lock id.

    `lost` has since when a card does not answer, and why, by bus id.
    """

    boot_id: str  # boot in which it was written
    sequence: int | None  # one more each time it is written
    boottime: float | None  # when it was written
    wall: float | None  # the same moment, epoch seconds
    looked: float | None  # when the driver last answered
    driver: str  # version of the driver
    fault: str  # why the driver is not looked at

    def __init__(self, values: dict[str, object]) -> None:
        self.__dict__ = {**BLANK[""], **values}
        self.devices: dict[str, DeviceSample] = {}
        self.tokens: dict[str, dict[str, ClaimUsage]] = {}
        self.lost: dict[str, tuple[float, str]] = {}

    def idle(self, device: str, token: str, oldest: float) -> float | None:
        """Return the observed seconds since a device was at work for a claim.

        None where nobody knows, and where it is not observed any more: for longer than `oldest`
        seconds at the last look.
        """
        account = self.tokens.get(token, {}).get(device)
        if account is None or account.seen is None or self.looked is None:
            return None
        return account.idle if self.looked - account.seen <= oldest else None


CLASSES = {"": Sample, "device": DeviceSample, "token": ClaimUsage}
TYPES = {line: of.__annotations__ for line, of in CLASSES.items()}
BLANK: dict[str, dict[str, object]] = {
    line: {key: EMPTY.get(kind) for key, kind in fields.items()} for line, fields in TYPES.items()
}


def read_sample(folder: str, now: float, boot_id: str, oldest: float = FRESH) -> Sample | None:
    """Return the last sample, None where there is none of this boot that is fresh.

    `now` is CLOCK_BOOTTIME in seconds.
    """
    sample = load_sample_file(f"{folder}/{SAMPLE}", SAMPLE_LINE)
    if sample is None or sample.boot_id != boot_id or sample.boottime is None:
        return None
    return sample if -AHEAD <= now - sample.boottime <= oldest else None


def read_finished_claim(folder: str, token: str) -> Sample | None:
    """Return what is left of one claim that is over, None where nothing is."""
    if not is_claim_token(token):
        return None
    return load_sample_file(f"{folder}/{FINISHED}/{token}", FINISHED_LINE)


def load_sample_file(path: str, first_line: str) -> Sample | None:
    """Return a file of either kind, None where there is none that can be read."""
    try:
        return parse_sample(atomic.read_text(path, LIMIT), first_line)
    except (OSError, kv.MalformedError):
        return None


def parse_sample(text: str, first_line: str) -> Sample:
    """Return the sample in a text; raise kv.MalformedError for another version."""
    head, _, body = text.partition("\n")
    if head != first_line:
        raise kv.MalformedError(f"begins with {head[:40]!r}, not with {first_line!r}")
    lines = [line.split(" ") for line in body.split("\n") if line]
    pairs = [" ".join(words) for words in lines if "=" in words[0]]
    sample = Sample(parse_sample_fields("", pairs)[0])
    for words in lines:
        if words[0] == "device" and len(words) >= DEVICE_WORDS:
            sample.devices[words[1]] = DeviceSample(
                *parse_sample_fields("device", words[DEVICE_WORDS:])
            )
        elif words[0] == "token" and len(words) >= TOKEN_WORDS and is_claim_token(words[1]):
            account = ClaimUsage(parse_sample_fields("token", words[TOKEN_WORDS:])[0])
            sample.tokens.setdefault(words[1], {})[words[2]] = account
        elif words[0] == LOST and len(words) > LOST_WORDS:
            try:
                sample.lost[words[1]] = parse_sample_real(words[2]), " ".join(words[3:])
            except ValueError:
                continue
    return sample


def parse_sample_fields(
    line: str, pairs: Iterable[str]
) -> tuple[dict[str, object], dict[str, str]]:
    """Return the values of the fields of a line, and the pairs that are no fields of it."""
    values: dict[str, object] = {}
    others: dict[str, str] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        kind = TYPES[line].get(key)
        if kind is None:
            others[key] = text
        elif equals:
            try:
                values[key] = convert_sample_value(kind, text)
            except ValueError:
                continue
    return values, others


def convert_sample_value(kind: str, text: str) -> object:
    """Return a value; raise ValueError for one that is not of its type. None is below 0."""
    if kind == TEXT:
        return text
    if kind == LIST:
        return tuple([parse_sample_count(word) for word in text.split(",")]) if text else ()
    return parse_sample_count(text) if kind == COUNT else parse_sample_real(text)


def parse_sample_count(text: str) -> int:
    """Return a whole number from 0; raise ValueError."""
    if not (text.isascii() and text.isdigit()) or len(text) > COUNT_DIGITS:
        raise ValueError("no whole number")
    return int(text)


def parse_sample_real(text: str) -> float:
    """Return a number from 0 that is finite; raise ValueError."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError("no number from 0")
    return number


def is_claim_token(text: str) -> bool:
    """Return whether a text may be a claim's token, and so the name of a file."""
    return 0 < len(text) <= TOKEN_LENGTH and text.isascii() and text.isalnum()
