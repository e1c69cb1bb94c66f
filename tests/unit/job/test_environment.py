# SPDX-License-Identifier: Apache-2.0
"""The variables of a job: right, or empty, never somebody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.errors import BROKEN, UNKNOWN, Refusal
from gpulock.job import environment
from gpulock.node.devices import Device
from gpulock.node.settings import Settings
from tests.support.faults import refusal

MASKS = ("CUDA_VISIBLE_DEVICES", "SGE_GPU")


def card(index: int, uuid: str = "", instance: str = "") -> Device:
    device = Device(f"0000:{index + 1:02x}:00.0{instance and f'.{instance}'}", index)
    device.uuid = uuid
    return device


def variables(granted: list[Device], **keys: str) -> dict[str, str]:
    pairs = environment.grant_variables(granted, Settings(keys), ("SGE_GPU",))
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def test_the_mask_is_the_indexes_and_all_else_the_uuids() -> None:
    found = variables([card(2, "GPU-b"), card(10, "GPU-k")])
    assert {name: found[name] for name in MASKS} == dict.fromkeys(MASKS, "2,10")
    assert found["NVIDIA_VISIBLE_DEVICES"] == found["GPULOCK_DEVICES"] == "GPU-b,GPU-k"
    assert found["GPU_DEVICE_ORDINAL"] == "2,10"
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_instances_are_masked_by_uuid_whatever_is_configured() -> None:
    found = variables([card(0, "MIG-a", "gi1.ci0"), card(0, "MIG-b", "gi2.ci0")])
    assert {found[name] for name in MASKS} == {"MIG-a,MIG-b"}
    assert "GPU_DEVICE_ORDINAL" not in found


@pytest.mark.parametrize("key", ["index", "uuid"])
def test_a_job_without_gpus_sees_none(key: str) -> None:
    found = variables([], VISIBLE_DEVICES=key)
    assert [found[name] for name in MASKS] == ["", ""]
    assert (found["NVIDIA_VISIBLE_DEVICES"], found["GPULOCK_DEVICES"]) == ("void", "")


def test_a_uuid_that_is_not_known_yet_leaves_all_uuids_out_but_the_mask_right() -> None:
    found = variables([card(0, "GPU-a"), card(1)])
    assert found["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert not {"NVIDIA_VISIBLE_DEVICES", "GPULOCK_DEVICES"} & set(found)


@pytest.mark.parametrize(
    ("granted", "keys"),
    [([card(0, "GPU-a"), card(1)], {"VISIBLE_DEVICES": "uuid"}), ([card(0, "", "gi1.ci0")], {})],
)
def test_a_mask_that_needs_a_uuid_not_known_is_could_not_find_out(
    granted: list[Device], keys: dict[str, str]
) -> None:
    assert refusal(lambda: variables(granted, **keys)).kind == UNKNOWN


def test_every_name_that_may_be_set_is_dropped_first() -> None:
    dropped = environment.grant_variable_names(("SGE_GPU",))
    of_shares = {name for name in environment.OPTIONAL_VARIABLES if "SHARE" in name}
    for granted in ([], [card(2, "GPU-b")]):
        assert set(variables(granted, CDI_DIR="/run/cdi")) == dropped - of_shares
    place = card(2, "GPU-b")
    place.places, place.memory_mib = 4, 8000
    assert set(variables([place], CDI_DIR="/run/cdi")) == dropped
    assert set(variables([card(2)])) < dropped
    shared = variables([place, place], SHARES="2:4", SHARE_MPS="yes")
    assert shared["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=4000M"
    assert shared["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"


def test_podman_is_told_the_names_of_the_cdi_spec_where_one_is_kept() -> None:
    granted = [card(0, "MIG-a", "gi1.ci0"), card(0, "MIG-b", "gi2.ci0")]
    assert variables(granted, CDI_DIR="/run/cdi")["GPULOCK_CDI"] == (
        "--device=gpulock.io/gpu=0000:01:00.0.gi1.ci0 --device=gpulock.io/gpu=0000:01:00.0.gi2.ci0"
    )
    assert variables([], CDI_DIR="/run/cdi")["GPULOCK_CDI"] == ""
    assert "GPULOCK_CDI" not in variables([card(2, "GPU-b")])


def test_podman_is_told_nvidias_names_where_a_spec_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "NVIDIA_SPECS", (str(tmp_path),))
    granted = [card(2, "GPU-b"), card(3, "GPU-c")]
    told = variables(granted)["GPULOCK_CDI"]
    assert told == "--device=nvidia.com/gpu=GPU-b --device=nvidia.com/gpu=GPU-c"
    assert "GPULOCK_CDI" not in variables([card(2)]), "its UUID is not known yet"
    assert variables(granted, CDI_DIR="/run/cdi")["GPULOCK_CDI"].startswith("--device=gpulock.io/")


def driver(root: Path, *parts: str, text: str = "") -> dict[str, str]:
    banner = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.172.08  Release Build"
    (root / "driver").mkdir()
    (root / "driver/version").write_text((text or banner) + "\nGCC version:  gcc version 12.3.0\n")
    for part in parts:
        (root / "sets/570.172.08" / part).mkdir(parents=True)
    return {"DRIVER_ROOT": str(root / "driver"), "DRIVER_DIR": str(root / "sets")}


@pytest.mark.parametrize(("parts", "kind"), [((), UNKNOWN), (("bin",), BROKEN), (("lib",), BROKEN)])
def test_a_driver_set_that_is_missing_is_a_broken_node_and_no_folder_a_wrong_value(
    tmp_path: Path, parts: tuple[str, ...], kind: str
) -> None:
    settings = Settings(driver(tmp_path, *parts))
    assert refusal(lambda: environment.driver_binds(settings)).kind == kind


@pytest.mark.parametrize("banner", ["", "no version", "../../etc", "1..2/../x"])
def test_a_version_that_is_none_makes_no_path(tmp_path: Path, banner: str) -> None:
    (tmp_path / "version").write_text(f"{banner}\n1.2.3\n")
    with pytest.raises(Refusal):
        environment.loaded_driver_version(str(tmp_path))


@pytest.mark.parametrize("folder", ["/a,b", "/a:b", "/a\\b", "/a\nb", "/\x1b[2J"])
def test_a_driver_folder_that_no_container_could_bind_is_refused(
    tmp_path: Path, folder: str
) -> None:
    keys = driver(tmp_path) | {"DRIVER_DIR": folder}
    with pytest.raises(Refusal, match="cannot be bound") as caught:
        environment.driver_binds(Settings(keys))
    assert caught.value.kind == UNKNOWN


OURS = "/sets/570.1/bin:/nvbin,/sets/570.1/lib:/nvlib"
OTHERS = "/sets/535.5.1/bin:/nvbin,/sets/535.5.1/lib:/nvlib"


@pytest.mark.parametrize(
    ("old", "kept"),
    [
        ("", ""),
        ("/scratch", "/scratch,"),
        (OURS, ""),
        (f"/scratch,{OURS}", "/scratch,"),
        (f"{OURS},/scratch:/s:ro", "/scratch:/s:ro,"),
        (OTHERS, ""),
        (f"/a,{OTHERS},/b,{OURS}", "/a,/b,"),
        ("/home/me/lib:/nvlib", "/home/me/lib:/nvlib,"),
        ("/sets/570.1/lib:/elsewhere", "/sets/570.1/lib:/elsewhere,"),
        ("/sets/570.1/other:/nvlib", "/sets/570.1/other:/nvlib,"),
        ("/a,,", "/a,"),
    ],
)
def test_our_binds_come_last_and_once_and_no_other_nodes_drivers(old: str, kept: str) -> None:
    assert environment.append_binds(old, OURS) == f"{kept}{OURS}"


@pytest.mark.parametrize(
    ("apptainer", "singularity", "expected"),
    [
        (None, None, ("", "")),
        ("/a", None, ("/a", "")),
        (None, "/s", ("/s", "/s")),
        ("", "/s", ("/s", "/s")),
        ("/a", "/s", ("/a", "/s")),
    ],
)
def test_a_bind_list_of_singularitys_name_is_apptainers_where_it_has_none(
    apptainer: str | None, singularity: str | None, expected: tuple[str, str]
) -> None:
    given = {"APPTAINER_BINDPATH": apptainer, "SINGULARITY_BINDPATH": singularity}
    environ = {name: value for name, value in given.items() if value is not None}
    assert tuple(value for _, value in environment.user_bind_lists(environ)) == expected
