# SPDX-License-Identifier: Apache-2.0
"""A node of Slurm for the installer's tests: simulated driver, recorded Slurm, one folder."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpulock.install import versions
from gpulock.install.doctor import doctor
from gpulock.install.doctor import slurm as doctor_slurm
from gpulock.install.hooks import HookPaths
from gpulock.install.items import Item, Outcome, Wanted, run_items
from gpulock.install.slurm import site
from gpulock.install.slurm.install import SlurmInstaller
from gpulock.install.slurm.site import Slurmd
from gpulock.install.slurm.spank import build_mark
from gpulock.simulate.node import write_simulated_node
from tests.support.in_process import compile_no_library, play_fakes_in_process
from tests.support.install_site import ignore
from tests.support.scripts import copy_program

RECORDED = Path(__file__).parent / "data/slurm-22.05"
FAKE = Path(__file__).parent / "fake_slurm.py"
NODE = "node1"


@dataclass(frozen=True)
class SlurmNode:
    """Where everything is."""

    root: Path
    config: Path

    @property
    def state(self) -> Path:
        """What the recorded Slurm knows."""
        return self.root / "slurm/state"

    @property
    def conf(self) -> Path:
        """slurm.conf of this node."""
        return self.root / "etc-slurm/slurm.conf"

    @property
    def map(self) -> Path:
        """The map that the installer writes."""
        return self.root / "node/state/slurm-map"

    @property
    def hooks(self) -> Path:
        """The folder of the hooks."""
        return self.root / "node/state/hooks"

    @property
    def paths(self) -> HookPaths:
        """The hooks in force."""
        return HookPaths(self.hooks / "current")

    @property
    def plugin(self) -> Path:
        """The SPANK plugin, where the installer puts it."""
        return self.hooks / "spank_gpulock.so"

    @property
    def spank_lines(self) -> tuple[str, str, str]:
        """The lines of plugstack.conf that the installer asks for beside pyxis."""
        above = f"required {self.plugin}"
        return (above, "required /x/spank_pyxis.so", f"{above} again")

    def stack(self, *lines: str) -> None:
        """Write plugstack.conf."""
        text = "".join(f"{line}\n" for line in lines)
        self.conf.with_name("plugstack.conf").write_text(text)

    def give_plugin(self) -> None:
        """Put what stands for the compiled plugin where the Makefile puts it."""
        self.plugin.parent.mkdir(exist_ok=True)
        self.plugin.write_bytes(build_mark(self.paths.slurm_task))
        self.plugin.chmod(0o644)

    def device(self, minor: int | str) -> str:
        """Return the file of a card, or of several."""
        return f"{self.root}/node/dev/nvidia{minor}"

    def parts(self) -> list[Item]:
        """Return the items of an installation."""
        return SlurmInstaller(self.config).parts()

    def differences(self) -> list[str]:
        """Return the titles of the items that an installation would change."""
        return self._run(self.parts(), Wanted.PRESENT, dry_run=True).changed

    def install(self) -> Outcome:
        """Install."""
        return self._run(self.parts(), Wanted.PRESENT)

    def uninstall(self) -> Outcome:
        """Uninstall."""
        return self._run(SlurmInstaller(self.config).removal(), Wanted.ABSENT)

    def _run(self, items: list[Item], wanted: Wanted, dry_run: bool = False) -> Outcome:
        return run_items(items, wanted, self.root / "node/state", ignore, dry_run)

    def put(self, key: str, value: str) -> None:
        """Set a key in slurm.conf and, as after `scontrol reconfigure`, in force."""
        with self.conf.open("a") as file:
            file.write(f"{key}={value}\n")
        self.set_in_force(key, value)

    def set_in_force(self, key: str, value: str) -> None:
        """Have slurmctld go by a value, whatever slurm.conf says."""
        text = (self.state / "config").read_text()
        line = rf"(?m)^({key}\s*)= .*$"
        assert re.search(line, text), key
        (self.state / "config").write_text(re.sub(line, rf"\1= {value}", text))

    def put_hooks(self) -> None:
        """Put all that the installer asks for into slurm.conf."""
        self.put("Prolog", str(self.paths.slurm_prolog))
        self.put("TaskProlog", str(self.paths.slurm_task))
        self.put("Epilog", str(self.paths.slurm_epilog))
        self.put("PrologFlags", "Alloc,Contain")
        self.put("RequeueExit", "213")

    def put_recommended(self) -> None:
        """Put what the installer recommends into slurm.conf."""
        self.put("LaunchParameters", "use_interactive_step")
        self.put("JobSubmitPlugins", "lua")
        self.put("SchedulerParameters", "bf_window=60,nohold_on_prolog_fail")
        self.put("PrologEpilogTimeout", "120")

    def list_gpus(self, *lines: str) -> None:
        """Let slurmd list these `Count=N File=F`, each with the rest of its line around."""
        text = "".join(f"slurmd: Gres Name=gpu {line} (null)\n" for line in lines)
        (self.state / "gres").write_text(text)

    def give_shards(self) -> None:
        """Let slurmd give out the first card in two parts, too."""
        with (self.state / "gres").open("a") as file:
            where = f"Index=0 ID=1918986455 File={self.device(0)}"
            file.write(f"slurmd: Gres Name=shard Type=(null) Count=2 {where} (null)\n")

    def set(self, **keys: str) -> None:
        """Add keys to the settings."""
        with self.config.open("a") as file:
            file.writelines(f"{key}={value}\n" for key, value in keys.items())


def make_slurm_node(folder: Path, patch: pytest.MonkeyPatch) -> SlurmNode:
    """Lay the node out and let the installer find a slurmd there."""
    folder.mkdir(exist_ok=True)
    node = write_simulated_node(folder / "node", "dgx1")
    (folder / "node/state").mkdir(exist_ok=True)
    programs = folder / "slurm"
    shutil.copytree(RECORDED, programs / "state")
    for name in ("bin/scontrol", "sbin/slurmd"):
        (programs / name).parent.mkdir()
        copy_program(FAKE, programs / name)
    conf = folder / "etc-slurm/slurm.conf"
    conf.parent.mkdir()
    conf.write_text("ClusterName=lab\nGresTypes=gpu\nNodeName=node1 Gres=gpu:8 CPUs=40\n")
    (conf.parent / "gres.conf").write_text(f"Name=gpu File={folder}/node/dev/nvidia[0-7]\n")
    (conf.parent / "cgroup.conf").write_text("ConstrainDevices=no\n")
    slurmd = Slurmd(os.getpid(), programs / "sbin/slurmd", str(conf), NODE)
    for module in (site, doctor):
        patch.setattr(module, "find_slurmds", lambda _: [slurmd])
    play_fakes_in_process(patch, site)
    compile_no_library(patch)
    # A dozen processes; they have their own tests.
    patch.setitem(versions._TRIALS, "slurm", ignore)
    patch.setattr(doctor_slurm, "try_slurm_hooks", ignore)
    config = folder / "etc/gpulock.conf"
    config.parent.mkdir()
    config.write_text(node.config.read_text())
    made = SlurmNode(folder, config)
    made.list_gpus(f"Type=(null) Count=8 Index=0 ID=7696487 File={made.device('[0-7]')}")
    return made


def told(node: SlurmNode) -> str:
    """Return all that an installation says, of what it leaves to the administrator and notes."""
    installer = SlurmInstaller(node.config)
    left = [one for item in installer.parts() if (one := item.remainder(Wanted.PRESENT))]
    return "\n".join([line for one in left for line in (one.clause, *one.page)] + installer.notes)
