# SPDX-License-Identifier: Apache-2.0
"""`gpulock uninstall slurm` puts back what was there, and leaves what others still need."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install.change import InstallRecord, install_record
from gpulock.install.hooks import InstallError
from gpulock.install.slurm.install import (
    SlurmUninstaller,
)
from gpulock.install.undo import transfer_shared_hooks
from gpulock.node.settings_file import read_settings
from gpulock.store import owner
from gpulock.store.owner import Owner
from tests.support.install_site import ignore, tree
from tests.support.slurm_node import SlurmNode

pytestmark = pytest.mark.slow


def lock(node: SlurmNode, scheduler: str, name: str = "0000:06:00.0") -> None:
    folder = node.root / "node/run/gpulock/locks" / name
    folder.mkdir(parents=True)
    job = Owner(scheduler=scheduler, node="node1", job_id="7", token="t", boot_id="b")
    record = job.copy(devices=(name,))
    (folder / "owner").write_text(owner.encode_owner(record))


def test_uninstall_puts_everything_back(node: SlurmNode) -> None:
    before = {k: v for k, v in tree(node.root).items() if not k.startswith("node/run")}
    node.install()

    assert SlurmUninstaller(node.config, ignore).undo() == []

    after = {k: v for k, v in tree(node.root).items() if not k.startswith("node/run")}
    assert after == before
    assert not (node.root / "libexec").exists()
    assert SlurmUninstaller(node.config, ignore).undo() == []


def test_hooks_that_are_in_no_record_are_in_one_after_another_installation(
    node: SlurmNode,
) -> None:
    """STATE_DIR was lost: doctor said that gpulock is not installed, and nothing was to be done."""
    node.install()
    record = install_record(read_settings(str(node.config)), "slurm")
    record.save({})

    node.install()

    assert [address[0] for address in record.load()] == ["hooks"]
    assert node.plan().changes == []
    assert SlurmUninstaller(node.config, ignore).undo() == []
    assert not (node.root / "libexec").exists()


def test_uninstall_refuses_while_a_slurm_job_holds_a_device(node: SlurmNode) -> None:
    node.install()
    lock(node, "slurm")

    with pytest.raises(InstallError, match=r"Slurm jobs hold 1 devices \(0000:06:00\.0\)"):
        SlurmUninstaller(node.config, ignore).undo()
    with pytest.raises(InstallError, match="--force --reason"):
        SlurmUninstaller(node.config, ignore).undo(force=True)

    assert node.map.exists()


def test_a_lock_of_grid_engine_does_not_stop_it_and_one_of_nobody_does(node: SlurmNode) -> None:
    node.install()
    lock(node, "sge")
    (node.root / "node/run/gpulock/locks/0000:07:00.0").mkdir()

    with pytest.raises(InstallError, match=r"1 devices \(0000:07:00\.0\)"):
        SlurmUninstaller(node.config, ignore).undo()

    (node.root / "node/run/gpulock/locks/0000:07:00.0").rmdir()
    assert SlurmUninstaller(node.config, ignore).undo() == []


def test_uninstall_refuses_while_slurm_leads_to_the_hooks_and_names_the_lines(
    node: SlurmNode,
) -> None:
    node.install()
    node.put_hooks()
    folder = node.root / "epilog.d"
    folder.mkdir()
    (folder / "10-gpulock").symlink_to(node.paths.slurm_epilog)
    node.put("Epilog", f"{folder}/*")

    said: list[str] = []
    with pytest.raises(InstallError, match="then scontrol reconfigure, and run it again"):
        SlurmUninstaller(node.config, said.append).undo()

    assert said == [
        f"from slurm.conf: Prolog={node.paths.slurm_prolog}",
        f"from slurm.conf: TaskProlog={node.paths.slurm_task}",
        f"on every node: rm {folder}/10-gpulock",
    ]
    assert node.paths.slurm_prolog.is_file()


def test_uninstall_refuses_where_it_cannot_see_what_slurm_starts(node: SlurmNode) -> None:
    node.install()
    (node.state / "down").touch()
    node.conf.unlink()

    with pytest.raises(InstallError, match="cannot be found out"):
        SlurmUninstaller(node.config, ignore).undo()

    assert SlurmUninstaller(node.config, ignore).undo(True, "moved") == []


def test_the_settings_obeyed_last_are_forgotten_with_the_last_installation(
    node: SlurmNode,
) -> None:
    node.install()
    copy = Path(read_settings(str(node.config), keep=True).copy_path)
    assert copy.is_file()

    assert SlurmUninstaller(node.config, ignore).undo() == []

    assert not copy.exists()


# --- beside Grid Engine --------------------------------------------------------------------------

HOOKS = ("hooks", "/prefix", "/etc/gpulock.conf", "/usr/bin/python3")
CONFIG = ("file", "/etc/gpulock.conf", "644")
QUEUE = ("queue", "gpu.q", "prolog")


def record(
    path: Path, entries: dict[tuple[str, ...], tuple[str | None, str | None]]
) -> InstallRecord:
    made = InstallRecord(path)
    made.save(entries)
    return made


def test_the_hooks_go_into_the_keeping_of_the_scheduler_that_stays(tmp_path: Path) -> None:
    slurm = record(
        tmp_path / "slurm.json", {CONFIG: (None, "A"), HOOKS: (None, "v1"), ("x",): (None, "y")}
    )
    sge = record(tmp_path / "sge.json", {CONFIG: ("A", "AB"), QUEUE: (None, "p")})

    assert transfer_shared_hooks(slurm, sge)

    assert slurm.load() == {("x",): (None, "y")}
    assert list(sge.load().items()) == [
        (HOOKS, (None, "v1")),
        (CONFIG, (None, "AB")),
        (QUEUE, (None, "p")),
    ]


def test_hooks_that_were_renewed_meanwhile_are_taken_back_whole(tmp_path: Path) -> None:
    slurm = record(tmp_path / "slurm.json", {HOOKS: ("v1", "v2")})
    sge = record(tmp_path / "sge.json", {HOOKS: (None, "v1"), QUEUE: (None, "p")})

    transfer_shared_hooks(sge, slurm)

    assert slurm.load() == {HOOKS: (None, "v2")}
    assert sge.load() == {QUEUE: (None, "p")}


def test_alone_nothing_is_handed_over(tmp_path: Path) -> None:
    slurm = record(tmp_path / "slurm.json", {HOOKS: (None, "v1")})

    assert not transfer_shared_hooks(slurm, InstallRecord(tmp_path / "sge.json"))

    assert slurm.load() == {HOOKS: (None, "v1")}


def test_slurm_leaves_the_hooks_that_grid_engine_uses(node: SlurmNode) -> None:
    node.install()
    sge = record(node.root / "node/state/install/sge.json", {QUEUE: (None, "p")})
    said: list[str] = []

    assert SlurmUninstaller(node.config, said.append).undo() == []

    assert "the hooks and the settings stay: Grid Engine uses them" in said
    assert node.paths.prolog.is_file()
    assert not node.map.exists()
    assert {address[0] for address in sge.load()} == {"hooks", "file", "queue"}

    slurm = record(node.root / "node/state/install/slurm.json", {("x",): (None, "y")})
    assert transfer_shared_hooks(sge, slurm)
    assert list(sge.load()) == [QUEUE]
