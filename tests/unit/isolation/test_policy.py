# SPDX-License-Identifier: Apache-2.0
"""What a job may open follows from its grant alone; a number that is not known refuses it."""

from pathlib import Path

import pytest

from gpulock.errors import BROKEN, UNKNOWN, Refusal
from gpulock.isolation import policy
from gpulock.node.devices import Device, place_device

CAPS = 508
CONTROL = {254, 255}
DEVICES = """Character devices:
  1 mem
195 nvidia-frontend
508 nvidia-caps
509 nvidia-caps-imex-channels

Block devices:
508 nvidia-caps
"""
MINORS = """config 1
monitor 2
gpu0/gi1/access 12
gpu0/gi1/ci0/access 13
gpu2/gi7/access 66
gpu2/gi7/ci0/access 67
gpu2/gi7/ci1/access 68
"""


def gpu(minor: int) -> Device:
    device = Device(f"0000:{minor + 1:02x}:00.0", minor)
    device.minor = minor
    return device


def instance(minor: int, name: str) -> Device:
    device = Device(f"{gpu(minor).id}.{name}", minor)
    device.minor = minor
    return device


@pytest.fixture
def driver(tmp_path: Path) -> str:
    (tmp_path / "nvidia-caps").mkdir()
    (tmp_path / "nvidia-caps/mig-minors").write_text(MINORS)
    return str(tmp_path / "nvidia")


def test_a_grant_opens_its_own_cards_and_what_every_program_needs(driver: str) -> None:
    assert policy.device_rules([gpu(0), gpu(5)], -1, driver) == {195: {0, 5, *CONTROL}}


def test_no_grant_opens_no_card_and_no_instance(driver: str) -> None:
    assert policy.device_rules([], CAPS, driver) == {195: CONTROL, CAPS: set()}


def test_an_instance_opens_its_card_and_its_own_two_access_nodes(driver: str) -> None:
    rules = policy.device_rules([instance(2, "gi7.ci1")], CAPS, driver)

    assert rules == {195: {2, *CONTROL}, CAPS: {66, 68}}


def test_places_open_their_card_and_no_instance(driver: str) -> None:
    places = [place_device(gpu(2), f"{gpu(2).id}.share{n}", 4) for n in (1, 4)]

    rules = policy.device_rules([place for place in places if place], CAPS, driver)

    assert rules == {195: {2, *CONTROL}, CAPS: set()}


@pytest.mark.parametrize(
    ("device", "major", "kind"),
    [
        *[(gpu(minor), -1, UNKNOWN) for minor in (-1, 254, 255, 300)],  # no card has that minor
        (instance(2, "gi9.ci0"), CAPS, UNKNOWN),  # the driver does not tell its nodes
        (instance(0, "gi1.ci0"), -1, BROKEN),  # it has no access nodes at all
    ],
)
def test_a_device_whose_numbers_are_not_known_refuses_the_job(
    driver: str, device: Device, major: int, kind: str
) -> None:
    with pytest.raises(Refusal) as told:
        policy.device_rules([device], major, driver)

    assert told.value.kind == kind


def test_the_major_is_that_of_the_very_name_among_character_devices() -> None:
    assert policy.parse_device_major("nvidia-caps", DEVICES) == CAPS
    assert policy.parse_device_major("nvidia-caps-imex-channels", DEVICES) == CAPS + 1
    assert policy.parse_device_major("nvidia", DEVICES) == -1
    assert (
        policy.parse_device_major("nvidia-caps", DEVICES.replace("508 nvidia-caps\n5", "5")) == -1
    )


def test_a_proc_without_devices_refuses_the_job(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as told:
        policy.read_caps_major(str(tmp_path))

    assert told.value.kind == UNKNOWN
