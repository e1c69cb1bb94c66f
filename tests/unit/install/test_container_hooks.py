# SPDX-License-Identifier: Apache-2.0
"""Hooks of enroot and podman are put there where asked, and go with the last scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install import container_hooks
from gpulock.install.container_hooks import ENROOT_HOOK, PODMAN_HOOK, PODMAN_PROGRAM
from gpulock.install.files import InstallError, find_share_folder
from gpulock.install.hooks import hooks_python
from gpulock.install.items import ItemRun, Wanted
from tests.support.install_site import ignore

PROLOG = find_share_folder() / "prolog"
FILES = {"enroot": [ENROOT_HOOK], "podman": [PODMAN_PROGRAM, PODMAN_HOOK]}
BOTH = pytest.mark.parametrize("name", FILES)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Return where the hooks of each go; neither enroot nor podman is there yet."""
    made = {"enroot": tmp_path / "enroot", "podman": tmp_path / "containers/oci/hooks.d"}
    monkeypatch.setattr(container_hooks, "ENROOT_HOOKS", made["enroot"])
    monkeypatch.setattr(container_hooks, "PODMAN_HOOKS", made["podman"])
    return made


def install(name: str, asked: bool) -> list[str]:
    """Install a hook; return the files that changed."""
    items = container_hooks.choose_container_hooks(
        enroot=asked and name == "enroot", podman=asked and name == "podman"
    )
    return ItemRun(items, Wanted.PRESENT, ignore, dry_run=False).run().changed


@BOTH
def test_a_hook_is_put_there_where_asked_and_kept(folders: dict[str, Path], name: str) -> None:
    folder, files = folders[name], FILES[name]
    with pytest.raises(InstallError, match=f"--{name} puts a hook there"):
        install(name, True)
    (folder if name == "enroot" else folder.parents[1]).mkdir()
    assert install(name, False) == []

    assert install(name, True) == [f"file {folder / file}" for file in files]
    assert (folder / files[0]).stat().st_mode & 0o777 == 0o755
    assert install(name, False) == []
    (folder / files[0]).write_text("older\n")
    assert install(name, False) == [f"file {folder / files[0]}"]


def test_the_hooks_are_the_packages_and_podmans_names_its_interpreter(
    folders: dict[str, Path],
) -> None:
    folders["enroot"].mkdir()
    folders["podman"].mkdir(parents=True)
    for name in FILES:
        install(name, True)

    hook, program = folders["enroot"] / ENROOT_HOOK, folders["podman"] / PODMAN_PROGRAM
    assert hook.read_text() == (PROLOG / "enroot" / ENROOT_HOOK).read_text()
    first, _, rest = program.read_text().partition("\n")
    assert first == f"#!{hooks_python()} -IS"
    assert rest == (PROLOG / "podman" / PODMAN_PROGRAM).read_text().partition("\n")[2]
