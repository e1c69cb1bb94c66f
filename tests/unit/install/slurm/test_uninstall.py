# SPDX-License-Identifier: Apache-2.0
"""`gpulock uninstall slurm` removes its own files, and leaves what others still need."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpulock.install.change import Entries, InstallRecord, install_record
from gpulock.install.hooks import InstallError
from gpulock.install.slurm.uninstall import SlurmUninstaller
from gpulock.node.settings_file import read_settings
from gpulock.store import owner
from gpulock.store.owner import Owner
from tests.support.install_site import SgeFiles, ignore, tree
from tests.support.slurm_node import SlurmNode

pytestmark = pytest.mark.slow


def lock(node: SlurmNode, scheduler: str, name: str = "0000:06:00.0") -> None:
    folder = node.root / "node/run/gpulock/locks" / name
    folder.mkdir(parents=True)
    job = Owner(scheduler=scheduler, node="node1", job_id="7", token="t", boot_id="b")
    record = job.copy(devices=(name,))
    (folder / "owner").write_text(owner.encode_owner(record))


def test_uninstall_removes_all_but_settings_locks_and_history(node: SlurmNode) -> None:
    def files() -> dict[str, str]:
        found = tree(node.root)
        away = ("node/run", "etc/gpulock.conf")
        return {name: text for name, text in found.items() if not name.startswith(away)}

    before = files()
    node.install()
    settings = node.config.read_text()
    said: list[str] = []

    assert SlurmUninstaller(node.config, said.append).uninstall() == []

    assert files() == before
    assert node.config.read_text() == settings
    assert said[-1] == f"{node.config}, locks and history stay"
    assert not (node.root / "libexec").exists()
    assert SlurmUninstaller(node.config, ignore).uninstall() == []


def test_hooks_that_are_in_no_record_are_in_one_after_another_installation(
    node: SlurmNode,
) -> None:
    """STATE_DIR was lost: doctor said that gpulock is not installed, and nothing was to be done."""
    node.install()
    record = install_record(read_settings(str(node.config)), "slurm")
    record.save({})

    node.install()

    assert "hooks" in [address[0] for address in record.load()]
    assert node.plan().changes == []
    assert SlurmUninstaller(node.config, ignore).uninstall() == []
    assert not (node.root / "libexec").exists()


def test_uninstall_refuses_while_a_slurm_job_holds_a_device(node: SlurmNode) -> None:
    node.install()
    lock(node, "slurm")

    with pytest.raises(InstallError, match=r"Slurm jobs hold 1 devices \(0000:06:00\.0\)"):
        SlurmUninstaller(node.config, ignore).uninstall()
    with pytest.raises(InstallError, match="--force --reason"):
        SlurmUninstaller(node.config, ignore).uninstall(force=True)

    assert node.map.exists()


def test_a_lock_of_grid_engine_does_not_stop_it_and_one_of_nobody_does(node: SlurmNode) -> None:
    node.install()
    lock(node, "sge")
    (node.root / "node/run/gpulock/locks/0000:07:00.0").mkdir()

    with pytest.raises(InstallError, match=r"1 devices \(0000:07:00\.0\)"):
        SlurmUninstaller(node.config, ignore).uninstall()

    (node.root / "node/run/gpulock/locks/0000:07:00.0").rmdir()
    assert SlurmUninstaller(node.config, ignore).uninstall() == []


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
        SlurmUninstaller(node.config, said.append).uninstall()

    assert said == [
        f"take out of {node.conf}:",
        "",
        f"    Prolog={node.paths.slurm_prolog}",
        f"    TaskProlog={node.paths.slurm_task}",
        f"    Epilog={node.paths.slurm_epilog}",
        "",
        f"change in {node.conf}, unless something else needs it as it is:",
        "",
        "    PrologFlags=Alloc,Contain",
        "    -> PrologFlags=Alloc",
        "    RequeueExit=213",
        "    -> (take it out)",
        "",
        f"on every node: rm {folder}/10-gpulock",
    ]
    assert node.paths.slurm_prolog.is_file()


def test_what_leads_to_the_hooks_is_named_as_it_stands_and_the_next_run_completes(
    node: SlurmNode,
) -> None:
    """Three of five settings were named, not one as the file had it."""
    node.install()
    node.put_hooks()
    text = node.conf.read_text()
    lines = (
        f"  prolog = {node.paths.slurm_prolog} Epilog={node.paths.slurm_epilog} # ours",
        "RequeueExit=75,213",
    )
    (node.conf.parent / "more.conf").write_text("".join(f"{line}\n" for line in lines))
    kept = re.sub(r"(?m)^(Prolog|Epilog|TaskProlog|PrologFlags|RequeueExit)=.*\n", "", text)
    node.conf.write_text(f"{kept}include more.conf\n")
    said: list[str] = []

    with pytest.raises(InstallError, match="Slurm still starts the hooks"):
        SlurmUninstaller(node.config, said.append).uninstall()

    more = node.conf.parent / "more.conf"
    assert said[:9] == [
        *(f"take out of {more}:", "", f"    {lines[0]}", ""),
        *(f"change in {more}, unless something else needs it as it is:", ""),
        *("    RequeueExit=75,213", "    -> RequeueExit=75", ""),
    ]
    assert said[9:] == [f"from the slurm.conf of slurmctld: TaskProlog={node.paths.slurm_task}"]

    more.write_text("RequeueExit=75\n")
    for key in ("Prolog", "Epilog", "TaskProlog"):
        node.set_in_force(key, "(null)")
    said.clear()
    assert SlurmUninstaller(node.config, said.append).uninstall() == []
    assert not [line for line in said if "RequeueExit" in line]
    assert not (node.root / "libexec").exists()


def test_uninstall_refuses_where_it_cannot_see_what_slurm_starts(node: SlurmNode) -> None:
    node.install()
    (node.state / "down").touch()
    node.conf.unlink()

    with pytest.raises(InstallError, match="cannot be found out"):
        SlurmUninstaller(node.config, ignore).uninstall()

    assert SlurmUninstaller(node.config, ignore).uninstall(True, "moved") == []


def test_the_settings_obeyed_last_are_forgotten_with_the_last_installation(
    node: SlurmNode,
) -> None:
    node.install()
    copy = Path(read_settings(str(node.config), keep=True).copy_path)
    assert copy.is_file()

    assert SlurmUninstaller(node.config, ignore).uninstall() == []

    assert not copy.exists()


# --- beside Grid Engine --------------------------------------------------------------------------


def other_record(node: SlurmNode) -> InstallRecord:
    """Have Grid Engine installed here as well."""
    sge = InstallRecord(node.root / "node/state/install/sge.json")
    sge.save({("configuration", "node1", "load_sensor"): None})
    return sge


def test_slurm_leaves_the_hooks_that_grid_engine_uses(node: SlurmNode) -> None:
    node.install()
    sge = other_record(node)
    said: list[str] = []

    assert SlurmUninstaller(node.config, said.append).uninstall() == []

    assert "the hooks stay: Grid Engine uses them" in said
    assert node.paths.prolog.is_file()
    assert not node.map.exists()
    assert {address[0] for address in sge.load()} == {"hooks", "configuration"}


def test_the_hooks_of_two_schedulers_go_with_the_second(node: SlurmNode) -> None:
    node.install()
    sge = other_record(node)
    slurm = install_record(read_settings(str(node.config)), "slurm")
    hooks: Entries = {a: v for a, v in slurm.load().items() if a[0] == "hooks"}
    sge.note(hooks)

    assert SgeFiles(node.config, ignore).uninstall() == []
    assert node.paths.prolog.is_file()
    assert SlurmUninstaller(node.config, ignore).uninstall() == []
    assert not (node.root / "libexec").exists()
