# SPDX-License-Identifier: Apache-2.0
"""The CDI spec that gpulockd keeps: names, nodes, and who may have written it."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from gpulock.daemon.reconcile import cdi
from gpulock.daemon.reconcile.cdi import CdiSpecWriter
from gpulock.daemon.reconcile.reconcile import ReconcileReport
from gpulock.errors import BROKEN, Refusal
from gpulock.job import environment
from gpulock.node.settings import Settings
from tests.support.cli_site import Site
from tests.support.journal import HeardJournal
from tests.support.wait import wait_until

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?\Z")  # validated by CDI's own parser
PRESETS = ("dgx1", "dgx-h200", "a100-mig", "workstation")


def told(site: Site) -> Any:
    """Return the spec of a node."""
    node = site.node()
    return json.loads(cdi.format_cdi_spec(node.settings, node.devices()))


def nodes(spec: Any) -> dict[str, list[str]]:
    """Return the nodes of each name."""
    found = {
        entry["name"]: [node["path"] for node in entry["containerEdits"]["deviceNodes"]]
        for entry in spec["devices"]
    }
    assert len(found) == len(spec["devices"])
    return found


def test_an_instance_brings_its_card_and_its_own_access_nodes_and_no_card_is_whole(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path, "a100-mig")
    found = nodes(told(site))

    access: list[str] = []
    for gpu in site.files.machine.gpus:
        for instance in gpu.mig:
            own = found[f"{gpu.bus}.{instance.name}"]
            assert own[0] == f"/dev/nvidia{gpu.minor}"
            access += own[1:]
        if gpu.mig:
            assert gpu.bus not in found
    assert len(access) == len(set(access)) == 12
    assert all((site.files.dev_root / node.removeprefix("/dev/")).exists() for node in access)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_name_is_one_and_what_a_job_is_told_is_among_them(
    tmp_path: Path, preset: str
) -> None:
    site = Site(tmp_path, preset)
    site.set(f"CDI_DIR={tmp_path}/cdi\n")
    found, settings = site.node().devices(), site.node().settings
    spec = told(site)

    given = dict(environment.grant_variables(found, settings))[environment.CDI_FLAGS].split(" ")
    known = {f"--device={spec['kind']}={name}" for name in nodes(spec)}
    assert len(given) == len(found)
    assert set(given) <= known
    assert [name for name in nodes(spec) if not NAME.match(name)] == []


def test_a_card_with_a_fault_is_left_out_and_so_is_a_control_node_that_is_not_there(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    (site.files.driver_root / "gpus" / site.id(3) / "information").write_text("garbage\n")
    (site.files.dev_root / "nvidia-uvm-tools").unlink()

    spec = told(site)
    found, edits = nodes(spec), spec["containerEdits"]
    assert (site.id(3) in found, site.id(4) in found) == (False, True)
    assert [node["path"] for node in edits["deviceNodes"]] == ["/dev/nvidiactl", "/dev/nvidia-uvm"]
    assert edits["deviceNodes"][0]["hostPath"] == f"{site.files.dev_root}/nvidiactl"
    assert edits["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]


def test_this_nodes_driver_is_mounted_read_only_where_containers_look(tmp_path: Path) -> None:
    site = Site(tmp_path)
    version = environment.loaded_driver_version(str(site.files.driver_root))
    for part in ("bin", "lib"):
        (tmp_path / "sets" / version / part).mkdir(parents=True)
    assert told(site)["containerEdits"]["mounts"] == []
    site.set(f"DRIVER_DIR={tmp_path}/sets\n")

    mounts = told(site)["containerEdits"]["mounts"]
    assert [(m["hostPath"], m["containerPath"]) for m in mounts] == [
        (f"{tmp_path}/sets/{version}/bin", "/nvbin"),
        (f"{tmp_path}/sets/{version}/lib", "/nvlib"),
    ]
    assert all("ro" in m["options"] for m in mounts)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_folder_in_which_others_write_gets_no_spec(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "cdi"
    folder.mkdir()
    folder.chmod(mode)

    with pytest.raises(Refusal, match=f"mode 0{mode:o}") as caught:
        cdi.update_cdi_spec(Settings({"CDI_DIR": str(folder)}), "{}\n")
    assert caught.value.kind == BROKEN
    assert os.listdir(folder) == []


class Chore(CdiSpecWriter):
    """gpulockd's chore on a site, and what it said."""

    def __init__(self, site: Site) -> None:
        self.node = site.node()
        self.heard = HeardJournal()
        super().__init__(self.heard)

    def go(self) -> list[str]:
        """Run it once; return what was said."""
        self.run(self.node, ReconcileReport([], []), 0.0)
        return self.heard.said()


def test_gpulockd_says_once_what_keeps_it_from_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    site = Site(tmp_path)
    site.set(f"CDI_DIR={tmp_path}/cdi\nDRIVER_DIR={tmp_path}/sets\n")
    version = environment.loaded_driver_version(str(site.files.driver_root))
    chore = Chore(site)

    (said,) = [*chore.go(), *chore.go()]
    assert "no CDI spec: no driver set" in said
    assert site.call("reap").exit_code == 0
    assert "gpulock: reap: no CDI spec: no driver set" in capfd.readouterr().err
    for part in ("bin", "lib"):
        (tmp_path / "sets" / version / part).mkdir(parents=True)

    assert ["no longer" in line for line in chore.go()] == [True]
    assert (tmp_path / "cdi" / cdi.SPEC_NAME).exists()


def test_a_file_server_that_does_not_answer_keeps_gpulockd_from_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)
    site.set(f"CDI_DIR={tmp_path}/cdi\nDRIVER_DIR={tmp_path}/sets\n")
    answered = threading.Event()
    asked = list[Settings]()

    def hangs(settings: Settings) -> str:
        asked.append(settings)
        answered.wait()
        return ""

    monkeypatch.setattr(cdi, "driver_binds", hangs)
    monkeypatch.setattr(cdi, "SECONDS", 0.05)
    chore = Chore(site)
    (line,) = [*chore.go(), *chore.go()]
    assert f"no CDI spec: {tmp_path}/sets does not answer; see its mount" in line
    assert len(asked) == 1
    answered.set()
    (line,) = wait_until(chore.go, why="the file")
    assert "no longer" in line and (tmp_path / "cdi" / cdi.SPEC_NAME).exists()


def test_an_instance_whose_access_nodes_are_not_told_is_left_out(tmp_path: Path) -> None:
    site = Site(tmp_path, "a100-mig")
    whole = nodes(told(site))
    (site.files.driver_root.parent / "nvidia-caps/mig-minors").unlink()

    left = nodes(told(site))
    assert {name for name in whole if ".gi" in name} == set(whole) - set(left)


def test_it_is_written_once_for_everybody_to_read_also_by_reap(tmp_path: Path) -> None:
    site = Site(tmp_path)
    chore = Chore(site)
    assert chore.go() == []
    assert list(tmp_path.rglob(cdi.SPEC_NAME)) == []
    site.set(f"CDI_DIR={tmp_path}/run/cdi\n")
    assert site.call("reap").exit_code == 0
    path = tmp_path / "run/cdi" / cdi.SPEC_NAME
    first = path.stat()
    assert json.loads(path.read_text()) == told(site)
    assert (first.st_mode & 0o777, os.listdir(path.parent)) == (0o644, [cdi.SPEC_NAME])
    assert Chore(site).go() == []
    assert path.stat().st_ino == first.st_ino
    shutil.rmtree(site.files.driver_root / "gpus")
    assert site.call("reap").exit_code == 0
