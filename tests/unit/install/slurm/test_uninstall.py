# SPDX-License-Identifier: Apache-2.0
"""`gpulock uninstall slurm` removes its own files, and leaves what others still need."""

from __future__ import annotations

import re

import pytest

from gpulock.install import container_hooks
from gpulock.install.items import Wanted
from gpulock.sge.card_map import format_card_map
from gpulock.store import owner
from gpulock.store.owner import Owner
from tests.support.install_site import tree
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
        away = ("node/run", "node/state/install.lock", "etc/gpulock.conf")
        return {name: text for name, text in found.items() if not name.startswith(away)}

    before = files()
    node.install()
    settings = node.config.read_text()

    done = node.uninstall()

    assert done.verdict("slurm", Wanted.ABSENT, dry_run=False) == "uninstalled: slurm"
    assert files() == before
    assert node.config.read_text() == settings
    assert not node.hooks.exists()
    assert node.uninstall().changed == []


def test_uninstall_refuses_while_a_slurm_job_holds_a_device(node: SlurmNode) -> None:
    node.install()
    lock(node, "slurm")

    (clause,) = node.uninstall().clauses()

    assert clause.startswith("Slurm's jobs hold 1 devices (0000:06:00.0)")
    assert clause.endswith(", or --force --reason TEXT")
    assert node.map.exists() and node.paths.slurm_epilog.is_file()
    assert node.uninstall(force=True).clauses() == []
    assert not node.map.exists()


def test_a_lock_of_grid_engine_does_not_stop_it_and_one_of_nobody_does(node: SlurmNode) -> None:
    node.install()
    lock(node, "sge")
    (node.root / "node/run/gpulock/locks/0000:07:00.0").mkdir()

    assert "1 devices (0000:07:00.0)" in node.uninstall().clauses()[0]

    (node.root / "node/run/gpulock/locks/0000:07:00.0").rmdir()
    assert node.uninstall().clauses() == []


def test_uninstall_refuses_while_slurm_leads_to_the_hooks_and_names_the_lines(
    node: SlurmNode,
) -> None:
    node.install()
    node.put_hooks()
    folder = node.root / "epilog.d"
    folder.mkdir()
    (folder / "10-gpulock").symlink_to(node.paths.slurm_epilog)
    node.put("Epilog", f"{folder}/*")

    (left,) = node.uninstall().remainders

    assert left.clause.endswith("then scontrol reconfigure, and run it again")
    hooks = (("Prolog", node.paths.slurm_prolog), ("TaskProlog", node.paths.slurm_task))
    assert sorted(left.page) == sorted(
        [
            *(f"from the slurm.conf of slurmctld: {key}={path}" for key, path in hooks),
            f"from the slurm.conf of slurmctld: Epilog={folder}/* (by {folder}/10-gpulock)",
        ]
    )
    assert node.paths.slurm_prolog.is_file() and node.map.exists()


def test_a_line_that_is_no_longer_in_force_is_named_and_the_next_run_completes(
    node: SlurmNode,
) -> None:
    """A hook that the file names comes into force at the next reconfigure."""
    node.install()
    node.put_hooks()
    more = node.conf.parent / "more.conf"
    pair = f"  prolog = {node.paths.slurm_prolog} Epilog={node.paths.slurm_epilog} # ours"
    more.write_text(f"{pair}\n")
    kept = re.sub(r"(?m)^(Prolog|Epilog|TaskProlog)=.*\n", "", node.conf.read_text())
    node.conf.write_text(f"{kept}include more.conf\n")
    for key in ("Prolog", "Epilog", "TaskProlog"):
        node.set_in_force(key, "(null)")

    (left,) = node.uninstall().remainders

    assert left.clause.startswith("Slurm still starts the hooks")
    assert [*left.page] == [
        f"from the slurm.conf of {node.conf}: Prolog={node.paths.slurm_prolog}",
        f"from the slurm.conf of {node.conf}: Epilog={node.paths.slurm_epilog}",
    ]

    more.write_text("RequeueExit=75\n")
    done = node.uninstall()
    assert (done.clauses(), done.remainders) == ([], [])
    assert not node.hooks.exists()


def test_uninstall_refuses_where_it_cannot_see_what_slurm_starts(node: SlurmNode) -> None:
    node.install()
    (node.state / "down").touch()
    node.conf.unlink()

    assert "cannot be found out" in node.uninstall().clauses()[0]

    assert node.paths.slurm_prolog.is_file()
    assert node.uninstall(force=True).clauses() == []
    assert not node.hooks.exists()


# --- beside Grid Engine --------------------------------------------------------------------------


def test_the_hooks_stay_while_grid_engine_uses_them_and_go_with_the_last(node: SlurmNode) -> None:
    hook = container_hooks.ENROOT_HOOKS / container_hooks.ENROOT_HOOK
    hook.parent.mkdir(parents=True)
    node.install(enroot=True)
    sge = node.map.with_name("sge-map")
    sge.write_text(format_card_map("node1", {}))

    assert node.uninstall().clauses() == []
    assert node.paths.prolog.is_file() and hook.exists() and not node.map.exists()

    sge.unlink()
    node.install()
    assert node.uninstall().clauses() == []
    assert not hook.exists() and not node.hooks.exists()
