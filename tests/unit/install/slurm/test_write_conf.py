# SPDX-License-Identifier: Apache-2.0
"""`install slurm --write-conf`: our lines in slurm.conf, in force, and all of it put back."""

from __future__ import annotations

import pytest

from gpulock.install.hooks import InstallError
from gpulock.install.slurm.install import SlurmUninstaller
from gpulock.install.slurm.site import list_other_nodes
from gpulock.install.slurm.write_conf import BACKUP, MARK, edit_slurm_conf
from tests.support.install_site import ignore
from tests.support.slurm_node import SlurmNode


def test_a_key_is_set_where_it_stands_and_a_new_one_at_the_end() -> None:
    text = "ClusterName=lab\nrequeueexit = 75 # ours\n#Prolog=/old\nNodeName=n1 CPUs=4\n"

    new = edit_slurm_conf(text, {"RequeueExit": "75,213", "Prolog": "/x"})

    assert new == (
        "ClusterName=lab\nRequeueExit=75,213\n#Prolog=/old\nNodeName=n1 CPUs=4\n"
        f"{MARK}\nProlog=/x\n"
    )
    assert edit_slurm_conf(new, {"RequeueExit": "75,213", "Prolog": "/x"}) == new
    assert edit_slurm_conf("A=1", {"Prolog": "/x"}) == f"A=1\n{MARK}\nProlog=/x\n"


@pytest.mark.parametrize("line", ["Prolog=/a Epilog=/b", "Prolog=/a \\", 'Prolog="/a b"'])
def test_a_line_with_more_than_the_one_key_is_left_to_a_person(line: str) -> None:
    with pytest.raises(InstallError, match="holds more than Prolog"):
        edit_slurm_conf(f"{line}\nEpilog=/b\n", {"Prolog": "/x"})


SHOWN = """NodeName=gpu1 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=dgx1.site Version=24.11.5
NodeName=dgx2 Arch=x86_64 NodeAddr=dgx2 NodeHostName=dgx2 Version=24.11.5
NodeName=new State=FUTURE
"""


@pytest.mark.parametrize(
    ("named", "host", "others"),
    [
        (["gpu1"], "dgx1", ["dgx2", "new"]),
        (["gpu1", "dgx2", "new"], "all", []),
        ([], "dgx1.site", ["dgx2", "new"]),
        ([], "dgx2", ["gpu1", "new"]),
        ([], "new", ["gpu1", "dgx2"]),
        ([], "controller", ["gpu1", "dgx2", "new"]),
    ],
)
def test_the_nodes_of_this_machine_are_not_others(
    named: list[str], host: str, others: list[str]
) -> None:
    """A slurmd without -N goes by the machine's name, as Debian's service starts it."""
    assert list_other_nodes(SHOWN, named, host) == others


def install(node: SlurmNode, **changes: bool) -> None:
    node.plan(write_conf=True, **changes).apply(ignore)


@pytest.mark.slow
def test_what_is_written_is_in_force_and_uninstall_puts_the_file_back(node: SlurmNode) -> None:
    before, mode = node.conf.read_bytes(), node.conf.stat().st_mode

    install(node)

    backup = node.conf.with_name(node.conf.name + BACKUP)
    assert backup.read_bytes() == before
    assert f"\nTaskProlog={node.paths.slurm_task}\n" in node.conf.read_text()
    assert f"Prolog = {node.paths.slurm_prolog}" in (node.state / "config").read_text()
    assert node.conf.stat().st_mode == mode
    plan = node.plan(write_conf=True)
    assert plan.changes == []
    assert "Into slurm.conf" not in str(plan.pages)

    assert SlurmUninstaller(node.config, ignore).undo() == []

    assert node.conf.read_bytes() == before
    assert not backup.exists()
    assert f"{node.root}/libexec" not in (node.state / "config").read_text()
    assert not (node.root / "libexec").exists()


@pytest.mark.slow
def test_a_file_that_is_written_but_not_in_force_is_put_in_force_by_the_next_run(
    node: SlurmNode,
) -> None:
    """The installer was killed before it told slurmctld, or slurmctld reads another file."""
    (node.state / "elsewhere").touch()
    with pytest.raises(InstallError, match=r"does not go by .*Prolog.* not in force"):
        install(node)

    (node.state / "elsewhere").unlink()
    install(node)

    assert f"Prolog = {node.paths.slurm_prolog}" in (node.state / "config").read_text()


@pytest.mark.slow
def test_a_line_that_somebody_added_since_stays_and_keeps_the_hooks(node: SlurmNode) -> None:
    install(node)
    with node.conf.open("a") as file:
        file.write("# mine\n")

    with pytest.raises(InstallError, match="Slurm still starts the hooks"):
        SlurmUninstaller(node.config, ignore).undo()

    assert node.conf.read_text().endswith("# mine\n")
    assert node.paths.slurm_prolog.is_file()


def other_nodes(node: SlurmNode) -> None:
    with (node.state / "node").open("a") as file:
        file.write("NodeName=node2 Arch=x86_64\n")


def site_prolog(node: SlurmNode) -> None:
    node.put("Prolog", "/site/prolog")


def no_controller(node: SlurmNode) -> None:
    (node.state / "down").touch()


def included(node: SlurmNode) -> None:
    node.conf.with_name("more.conf").write_text("RequeueExit=75\n")
    with node.conf.open("a") as file:
        file.write("Include more.conf\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (other_nodes, r"other nodes .*node2.*--installed-everywhere"),
        (site_prolog, "Prolog=/site/prolog is to run beside"),
        (no_controller, "Unable to contact slurm controller"),
        (included, r"more.conf sets RequeueExit"),
    ],
)
def test_what_a_person_has_to_decide_changes_nothing(
    node: SlurmNode, plant: object, says: str
) -> None:
    assert callable(plant)
    plant(node)
    before = node.conf.read_bytes()

    with pytest.raises(InstallError, match=says):
        install(node)

    assert node.conf.read_bytes() == before
    assert not (node.root / "libexec").exists()


@pytest.mark.slow
def test_other_nodes_are_believed_to_have_gpulock_where_the_administrator_says_so(
    node: SlurmNode,
) -> None:
    other_nodes(node)

    install(node, installed_everywhere=True)

    assert f"Prolog = {node.paths.slurm_prolog}" in (node.state / "config").read_text()
