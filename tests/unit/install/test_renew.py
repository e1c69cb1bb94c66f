# SPDX-License-Identifier: Apache-2.0
"""Hooks whose Python went with an upgrade of the distribution are rendered again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gpulock.install import container_hooks, renew
from gpulock.install.change import FilePlace
from gpulock.install.container_hooks import PODMAN_PROGRAM, podman_program_text
from gpulock.install.hooks import real_interpreter
from gpulock.install.installed import Installation
from gpulock.install.renew import renew_hooks
from gpulock.install.slurm.gres import slurm_map_text
from gpulock.install.versions import CURRENT, InstalledHooks
from gpulock.node.settings import Settings
from gpulock.node.settings_file import read_settings
from gpulock.sge.card_map import format_card_map
from gpulock.simulate.node import write_simulated_node
from tests.support.install_site import ignore


class Distribution:
    """A Python with a link to it, as packages have one, and a node with hooks."""

    def __init__(self, folder: Path) -> None:
        self.old = folder / "python3.old"
        shutil.copy(real_interpreter(), self.old)
        self.link = folder / "python3"
        self.link.symlink_to(self.old)
        config = write_simulated_node(folder / "node", "workstation").config
        self.settings: Settings = read_settings(str(config))
        self.hooks = InstalledHooks(folder / "hooks", config, str(self.link))
        self.said: list[str] = []

    def install(self) -> None:
        """Install the hooks, as the command for a scheduler does."""
        self.hooks.write(self.hooks.wanted())
        installed = Installation(self.hooks.prefix, str(self.link)).pairs()
        FilePlace(self.sge_map).write(format_card_map("node1", {}, installed))

    @property
    def sge_map(self) -> Path:
        """Return the map by which gpulock knows that it is installed for Grid Engine."""
        return Path(self.settings.state_dir, "sge-map")

    @property
    def slurm_map(self) -> Path:
        """Return the map by which gpulock knows that it is installed for Slurm."""
        return Path(self.settings.state_dir, "slurm-map")

    def install_slurm(self) -> None:
        """Have the same hooks installed for Slurm."""
        installed = Installation(self.hooks.prefix, str(self.link)).pairs()
        FilePlace(self.slurm_map).write(slurm_map_text(None, [], installed=installed))

    def upgrade(self) -> None:
        """Replace the Python by another, as an upgrade does."""
        self.old.unlink()
        self.link.unlink()
        self.link.symlink_to(real_interpreter())

    def renew(self, python: str) -> list[str]:
        """Render the hooks again; return what is said of it."""
        del self.said[:]
        renew_hooks(self.settings, python, self.said.append)
        return self.said

    def named(self) -> str:
        """Return the first line of a hook."""
        return (self.hooks.prefix / CURRENT / "prolog/sge").read_text().partition("\n")[0]


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Distribution:
    """A distribution on which nothing is installed, in a folder that is closed to nobody."""
    monkeypatch.setattr(renew, "try_slurm_hooks", ignore)
    return Distribution(tmp_path)


@pytest.mark.slow
def test_hooks_of_two_schedulers_run_by_the_new_python(
    there: Distribution,
) -> None:
    there.install()
    there.install_slurm()
    assert str(there.old) in there.named() and there.renew(str(there.link)) == []
    there.upgrade()

    (told,) = there.renew(real_interpreter())  # hooks of another environment are its own
    assert told.startswith("the hooks are another Python's: gpulock install sge, gpulock install")
    compiled, done = there.renew(str(there.link))
    assert compiled.startswith("prolog/drop-env is compiled by ")
    assert done == f"done: hooks {there.hooks.prefix}/{CURRENT}"

    assert there.named() == f"#!{real_interpreter()} -IS"


@pytest.mark.slow
def test_hooks_of_slurm_alone_are_rendered_again(there: Distribution) -> None:
    there.hooks.write(there.hooks.wanted())
    there.install_slurm()
    there.upgrade()

    assert there.renew(str(there.link)) == [f"done: hooks {there.hooks.prefix}/{CURRENT}"]
    assert there.named() == f"#!{real_interpreter()} -IS"
    assert there.renew(str(there.link)) == []


def test_podmans_hook_gets_the_new_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container_hooks, "PODMAN_HOOKS", tmp_path)
    program = FilePlace(tmp_path / PODMAN_PROGRAM, 0o755)
    settings = Settings({"STATE_DIR": str(tmp_path / "state")}, "")
    program.write("#!/gone/python3 -IS\n")

    renew_hooks(settings, real_interpreter(), ignore)

    assert program.read() == podman_program_text(real_interpreter())
    said: list[str] = []
    renew_hooks(settings, real_interpreter(), said.append)
    assert said == []
