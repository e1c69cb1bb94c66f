# SPDX-License-Identifier: Apache-2.0
"""Hooks whose Python went with an upgrade of the distribution are rendered again."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from click.testing import Result

from gpulock.cli import command_group
from gpulock.install import container_hooks, versions
from gpulock.install.container_hooks import PODMAN_PROGRAM
from gpulock.install.hooks import hooks_python
from gpulock.install.items import Wanted
from gpulock.install.versions import SGE, SLURM, Hooks, current_hooks
from gpulock.node.settings_file import read_settings
from gpulock.simulate.node import write_simulated_node
from tests.support.install_site import ignore
from tests.support.runner import command_runner


class Node:
    """A node with hooks for some schedulers, whose Python is a copy of this one."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.old, self.patch = folder / "python3.old", patch
        shutil.copy(hooks_python(), self.old)
        self.settings = read_settings(str(write_simulated_node(folder / "node", "dgx1").config))
        patch.setattr(versions, "_TRIALS", {SGE: ignore, SLURM: ignore})

    def install(self, *schedulers: str) -> None:
        """Install the hooks by the old Python, as the commands for schedulers do."""
        with self.patch.context() as patch:
            patch.setattr(sys, "executable", str(self.old))
            for name in schedulers:
                Path(self.settings.state_dir).mkdir(exist_ok=True)
                Path(self.settings.state_dir, f"{name}-map").touch()
                Hooks(self.settings, name).write(Wanted.PRESENT)

    def renew(self) -> Result:
        """Render the hooks again."""
        words = ["--config", self.settings.path, "install", "hooks"]
        return command_runner().invoke(command_group, words)

    def named(self) -> str:
        """Return the first line of a hook."""
        return current_hooks(self.settings).prolog.read_text().partition("\n")[0]


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("schedulers", [(SGE, SLURM), (SLURM,)])
def test_hooks_run_by_the_new_python(there: Node, schedulers: tuple[str, ...]) -> None:
    there.install(*schedulers)
    assert str(there.old) in there.named()
    there.old.unlink()

    done = there.renew()

    assert (done.exit_code, done.stdout) == (0, f"done: {Hooks(there.settings).title}\n")
    assert there.named() == f"#!{hooks_python()} -IS"
    assert there.renew().stdout == ""


def test_where_no_scheduler_starts_hooks_none_are_rendered(there: Node) -> None:
    assert (there.renew().exit_code, there.renew().stdout) == (0, "")
    assert not current_hooks(there.settings).folder.exists()


def test_podmans_hook_gets_the_new_python(there: Node, tmp_path: Path) -> None:
    there.patch.setattr(container_hooks, "PODMAN_HOOKS", tmp_path)
    program = tmp_path / PODMAN_PROGRAM
    program.write_text("#!/gone/python3 -IS\n")

    assert there.renew().stdout == f"done: file {program}\n"

    assert program.read_text().startswith(f"#!{hooks_python()} -IS\n")
    assert there.renew().stdout == ""
