# SPDX-License-Identifier: Apache-2.0
"""`gpulock install slurm` and uninstall on a recorded Slurm: made once, nothing of the cluster."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from gpulock.cli import command_group
from gpulock.cli.admin.items import UNFINISHED
from gpulock.daemon.core.instance_lock import InstanceLock
from gpulock.errors import Refusal
from gpulock.install.files import InstallError, lock_installation
from gpulock.install.items import Wanted, run_items
from gpulock.install.slurm import site
from gpulock.install.slurm.site import Slurmd
from gpulock.sge.card_map import format_card_map
from gpulock.slurm.gres_map import read_gres_map, read_shared_gres
from gpulock.store import owner
from gpulock.store.owner import Owner
from tests.support.install_site import harm, ignore, tree
from tests.support.runner import command_runner
from tests.support.scripts import write_script
from tests.support.slurm_node import SlurmNode, told

pytestmark = pytest.mark.slow


def test_what_is_installed_is_there_and_a_second_run_has_nothing_to_do(node: SlurmNode) -> None:
    node.install()

    gres = node.conf.with_name("gres.conf")
    positions = "".join(f"{number}={number}\n" for number in range(8))
    text = node.map.read_text()
    assert text.startswith(f"gpulock-slurm-map 1\ngres_conf={gres}\ngres_version=")
    assert text.endswith(positions)
    assert node.map.stat().st_mode & 0o777 == 0o644
    assert len(read_gres_map(str(node.map.parent))) == 8
    assert node.paths.slurm_task.is_file()
    settings = node.config.read_text()
    assert f"SLURM_BINARIES={node.root}/slurm/bin\n" in settings
    assert f"SLURM_CONF={node.conf}\n" in settings
    assert node.differences() == []


def set_unknown(node: SlurmNode) -> None:
    node.set(GUPS="8")


def be_old(node: SlurmNode) -> None:
    node.set_in_force("SLURM_VERSION", "21.08.8-2")


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (be_old, r"this Slurm is 21\.08\.8-2, .* on 22\.05 and newer: nothing"),
        (set_unknown, "unknown key 'GUPS'; correct the file"),
    ],
)
def test_what_is_not_known_is_corrected_before_an_installation(
    node: SlurmNode, plant: Callable[[SlurmNode], None], says: str
) -> None:
    plant(node)
    before = tree(node.root)

    with pytest.raises(InstallError, match=says):
        node.install()

    assert tree(node.root) == before


def test_no_hook_goes_by_a_map_whose_gres_conf_changed_while_it_is_installed(
    node: SlurmNode,
) -> None:
    """A linked one is named as slurmd names it."""
    gres = node.conf.with_name("gres.conf")
    gres.rename(node.root / "shared-gres.conf")
    gres.symlink_to(node.root / "shared-gres.conf")
    items = node.parts()
    node.conf.with_name("gres.conf").write_text("# another\n")

    run_items(items, Wanted.PRESENT, node.root / "node/state", ignore)

    with pytest.raises(Refusal, match="changed, and nobody has compared"):
        read_gres_map(str(node.map.parent))
    node.install()
    assert f"\ngres_conf={gres}\n" in node.map.read_text()
    assert read_gres_map(str(node.map.parent))
    gres.unlink()
    gres.symlink_to(node.conf)
    with pytest.raises(Refusal, match="changed"):
        read_gres_map(str(node.map.parent))


def test_a_list_without_a_position_takes_the_place_of_no_map_that_has_some(node: SlurmNode) -> None:
    """Its jobs were sent back: slurmd listed none, for it was asked without its libraries."""
    node.install()
    before = node.map.read_text()
    node.list_gpus()

    with pytest.raises(
        InstallError, match=r"slurmd -G lists no gres/gpu .*, rm .*/slurm-map first$"
    ):
        node.install()
    assert node.map.read_text() == before
    node.map.unlink()
    assert "so no job gets a GPU here; if one should" in told(node)


def test_slurmd_is_asked_with_the_libraries_of_the_one_that_runs(
    node: SlurmNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In `/`: LD_LIBRARY_PATH with an empty or relative entry leads to where the caller stands."""
    program = node.root / "slurm/sbin/slurmd"
    started = Slurmd(1, program, str(node.conf), libraries="/opt/driver/lib")
    monkeypatch.setattr(site, "find_slurmds", lambda _: [started])
    real = node.root / "slurm/sbin/slurmd-real"
    program.rename(real)
    wanted = '[ "$1" != -G ] || [ "$LD_LIBRARY_PATH $(pwd)" = "/opt/driver/lib /" ]'
    write_script(program, f'{wanted} || exit 9\nexec {sys.executable} -IS {real} "$@"')

    node.install()

    assert node.map.read_text().endswith("\n7=7\n")


def test_a_node_without_gpus_gets_an_empty_map_and_is_told(node: SlurmNode) -> None:
    node.list_gpus()

    assert "lists no gres/gpu with File= of this node" in told(node)
    node.install()

    assert read_gres_map(str(node.map.parent)) == {}


def test_several_slurmds_of_one_machine_are_refused_with_what_they_go_by(
    node: SlurmNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurmds = [Slurmd(1, node.root / "slurm/sbin/slurmd", str(node.conf), n) for n in ("n1", "n2")]
    monkeypatch.setattr(site, "find_slurmds", lambda _: slurmds)

    with pytest.raises(InstallError, match=r"\(n1 of .*slurm.conf, n2 of .*\); set SLURM_CONF"):
        node.parts()
    node.map.touch()  # of an installation before
    assert "cannot be found out: several slurmds" in node.uninstall().clauses()[0]


def test_parts_of_gpus_stop_the_installation_until_the_site_says_what_becomes_of_their_jobs(
    node: SlurmNode,
) -> None:
    node.install()
    node.give_shards()

    with pytest.raises(InstallError, match=r"parts of GPUs here \(gres/shard\).*SLURM_SHARDS="):
        node.parts()

    node.set(SLURM_SHARDS="refuse")
    node.install()
    assert "\nshared=shard\n" in node.map.read_text()
    assert node.differences() == []


def test_a_card_that_gres_conf_names_and_the_driver_lacks_stops_the_installation(
    node: SlurmNode,
) -> None:
    Path(node.device(9)).touch()
    node.list_gpus(f"Type=(null) Count=1 Index=9 ID=7 File={node.device(9)}")

    with pytest.raises(InstallError, match="the driver shows no GPU with this minor"):
        node.parts()

    node.set(SLURM_DEVICE_SELECTION="gpulock", SLURM_SHARDS="refuse")
    node.give_shards()  # of which the Prolog asks slurmctld, also without positions
    node.install()
    assert read_shared_gres(str(node.map.parent)) == ("shard",)
    assert read_gres_map(str(node.map.parent)) == {}
    assert node.differences() == []

    first = min(node.root.glob("node/proc/driver/nvidia/gpus/*/information"))
    first.write_text(re.sub(r"(?m)^Model:.*$", "Model: NVIDIA H200", first.read_text()))
    with pytest.raises(InstallError, match="the driver shows no GPU with this minor"):
        node.parts()


# --- uninstall: its own files go, and what others still need stays --------------------------------


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


def test_uninstall_refuses_while_a_job_of_slurms_or_nobodys_lock_holds_a_device(
    node: SlurmNode,
) -> None:
    node.install()
    lock(node, "slurm", "0000:0a:00.0")
    lock(node, "sge")
    (node.root / "node/run/gpulock/locks/0000:07:00.0").mkdir()

    (clause,) = node.uninstall().clauses()

    assert clause.startswith("Slurm's jobs hold 2 devices (0000:07:00.0 0000:0a:00.0)")
    assert clause.endswith("wait for the others, or gpulock release each")
    assert node.map.exists() and node.paths.slurm_epilog.is_file()


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


def test_without_slurmctld_nothing_is_installed_or_taken_away(node: SlurmNode) -> None:
    node.install()
    (node.state / "down").touch()

    with pytest.raises(InstallError, match="Unable to contact slurm controller"):
        node.install()
    (clause,) = node.uninstall().clauses()
    assert "cannot be found out" in clause

    assert node.paths.slurm_prolog.is_file()
    harm(node.root, clause.rpartition("where it is gone from this node: ")[2])
    assert node.uninstall().changed == []
    assert not node.hooks.exists()


# --- whatever is installed, edited and uninstalled, in any order: the text of the site stays ------

HOOK_KEYS = ("Prolog", "TaskProlog", "Epilog")


@pytest.mark.parametrize("seed", range(4))
def test_what_is_not_gpulocks_stays_to_the_byte(node: SlurmNode, seed: int) -> None:
    draw, folder = random.Random(seed), node.conf.parent

    def read() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.iterdir()}

    def edit() -> None:
        with draw.choice(sorted(folder.iterdir())).open("ab") as file:
            file.write(f"# R\xe4ume of {draw.random()}\r\n".encode("latin-1"))

    for _ in range(12):
        draw.choice([edit, node.put_hooks])()
        before = read()
        draw.choice([node.install, node.uninstall])()
        assert read() == before

    text = node.conf.read_text("latin-1")
    node.conf.write_text(re.sub(rf"(?m)^({'|'.join(HOOK_KEYS)})=.*$", "", text))
    for key in HOOK_KEYS:
        node.set_in_force(key, "(null)")
    assert node.uninstall().clauses() == []
    assert not node.hooks.exists() and not node.map.exists()


# --- beside Grid Engine --------------------------------------------------------------------------


def test_the_hooks_stay_while_grid_engine_uses_them_and_go_with_the_last(node: SlurmNode) -> None:
    node.install()
    sge = node.map.with_name("sge-map")
    sge.write_text(format_card_map("node1", {}))

    assert node.uninstall().clauses() == []
    assert node.paths.prolog.is_file() and not node.map.exists()

    sge.unlink()
    node.install()
    assert node.uninstall().clauses() == []
    assert not node.hooks.exists()


# --- the commands, as an administrator types them -------------------------------------------------

LACKS = "slurm.conf lacks Prolog, TaskProlog, Epilog, PrologFlags=Contain, RequeueExit=213"


def call(node: SlurmNode, *args: str) -> Result:
    return command_runner().invoke(command_group, ["--config", str(node.config), *args])


def install(node: SlurmNode, *args: str) -> Result:
    return call(node, "install", "slurm", *args)


def test_no_line_that_is_shown_is_longer_than_a_terminal(node: SlurmNode) -> None:
    node.put("SchedulerParameters", "bf_window=4320,bf_continue,bf_max_job_test=500")
    node.put("Prolog", "/site/prolog")

    said, _, page = install(node, "--dry-run").stdout.partition("Into slurm.conf")

    assert "gres.conf is younger than slurmd" in said
    page, _, verdict = page.partition("\n3 changes would be made; then ")
    assert verdict.startswith("slurm.conf lacks ")
    assert not node.map.exists()
    for line in page.replace(str(node.root), "/usr/local").splitlines():
        assert len(line) <= 100, line


def test_the_help_of_install_is_not_cut(node: SlurmNode) -> None:
    assert "..." not in call(node, "install", "--help").stdout.partition("Commands:")[2]


def test_a_second_installation_says_that_another_runs(node: SlurmNode) -> None:
    with lock_installation(node.root / "node/state"):
        refused = [install(node), call(node, "install", "slurm", "--dry-run")]
        mode = (node.root / "node/state/install.lock").stat().st_mode & 0o777

    assert ([done.exit_code for done in refused], mode) == ([1, 0], 0o600)
    assert "runs already (fuser -v " in refused[0].stderr
    assert not node.map.exists()


def test_installing_says_that_it_is_not_in_force_until_slurm_conf_has_the_lines(
    node: SlurmNode,
) -> None:
    done, again = install(node), install(node)

    assert f"done: file {node.map}\n" in done.stdout
    assert f"\ninstalled, NOT in force: {LACKS}\n" in done.stdout
    assert "scontrol reconfigure" in done.stdout and "printenv" not in done.stdout
    assert "\nnote: gpulockd does not run" in done.stdout
    assert (done.exit_code, again.exit_code) == (UNFINISHED, UNFINISHED)
    assert f"nothing to change on this node, NOT in force: {LACKS}\n" in again.stdout

    node.put_hooks()
    running = InstanceLock()
    running.take(str(node.root / "node/run/gpulock"))
    whole = install(node)
    running.release()
    assert "gpulockd does not run" not in whole.stdout
    assert whole.exit_code == 0
    assert "nothing to change: slurm is in force\n" in whole.stdout
    assert "as an ordinary user: srun --nodelist=node1 --gres=gpu:1 /usr/bin" in whole.stdout
