# SPDX-License-Identifier: Apache-2.0
"""`install slurm --write-conf`: one block in slurm.conf, written once, and never put back."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulock.install.hooks import InstallError
from gpulock.install.slurm.site import list_other_nodes
from gpulock.install.slurm.slurm_conf import read_slurm_conf
from gpulock.install.slurm.uninstall import SlurmUninstaller
from gpulock.install.slurm.write_conf import BEGIN, END, add_block
from tests.support.install_site import ignore
from tests.support.slurm_node import SlurmNode


def test_the_lines_are_one_block_at_the_end_whatever_the_last_line_is() -> None:
    lines = {"RequeueExit": "213", "Prolog": "/x"}
    block = f"{BEGIN}\nRequeueExit=213\nProlog=/x\n{END}\n"

    assert add_block("A=1\n", lines) == f"A=1\n{block}"
    assert add_block("A=1", lines) == f"A=1\n{block}"
    assert add_block("", lines) == block
    assert add_block("A=1", {}) == "A=1"


def test_a_backslash_at_the_end_of_the_last_line_takes_a_comment_alone(tmp_path: Path) -> None:
    path = tmp_path / "slurm.conf"
    path.write_text(add_block("A=1 \\\n", {"Prolog": "/x"}))

    assert read_slurm_conf(path).values == {"a": "1", "prolog": "/x"}


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


def block_of(node: SlurmNode) -> list[str]:
    """Return the lines between the marks, with them."""
    lines = node.conf.read_text().splitlines()
    return lines[lines.index(BEGIN) : lines.index(END) + 1]


@pytest.mark.slow
def test_what_is_written_is_in_force_and_owner_and_mode_stay(node: SlurmNode) -> None:
    node.conf.chmod(0o664)
    before, there = node.conf.read_text(), {*node.conf.parent.iterdir()}

    install(node)

    assert node.conf.read_text().startswith(before)
    assert f"TaskProlog={node.paths.slurm_task}" in block_of(node)
    assert f"Prolog = {node.paths.slurm_prolog}" in (node.state / "config").read_text()
    assert node.conf.stat().st_mode & 0o777 == 0o664
    assert {*node.conf.parent.iterdir()} == there, "a copy is something to put back"
    plan = node.plan(write_conf=True)
    assert plan.changes == []
    assert "Into slurm.conf" not in str(plan.pages)


@pytest.mark.slow
def test_nothing_is_put_back_over_what_an_administrator_wrote(node: SlurmNode) -> None:
    """396 nodes and all comments went with an earlier file, and slurmctld 22.05 ended by it."""
    install(node)
    nodes = "".join(f"NodeName=n{number} CPUs=4  # rack {number}\n" for number in range(396))
    node.conf.write_text(f"{node.conf.read_text()}{nodes}")
    install(node)
    written, said = node.conf.read_text(), list[str]()

    with pytest.raises(InstallError, match="Slurm still starts the hooks"):
        SlurmUninstaller(node.config, said.append).uninstall()

    assert node.conf.read_text() == written
    assert said == [f"take out of {node.conf}:", "", *(f"    {one}" for one in block_of(node)), ""]
    assert node.paths.slurm_prolog.is_file()

    block = "".join(f"{line}\n" for line in block_of(node))
    node.conf.write_text(written.replace(block, ""))
    node.reconfigure()
    assert SlurmUninstaller(node.config, ignore).uninstall() == []
    assert node.conf.read_text() == written.replace(block, "")
    assert not (node.root / "libexec").exists()


@pytest.mark.slow
def test_a_list_that_was_merged_into_the_block_is_shown_without_our_word(node: SlurmNode) -> None:
    install(node)
    node.conf.write_text(node.conf.read_text().replace("Flags=", "Flags=X11,"))
    said: list[str] = []

    with pytest.raises(InstallError):
        SlurmUninstaller(node.config, said.append).uninstall()

    at = said.index("    PrologFlags=X11,Contain")
    assert said[at + 1] == "    -> PrologFlags=X11"


@pytest.mark.slow
def test_where_gpulock_wrote_before_it_writes_nothing_and_shows_what_is_missing(
    node: SlurmNode,
) -> None:
    """A line that was deleted from the file was in force still, and so was no change."""
    install(node)
    line = f"Epilog={node.paths.slurm_epilog}\n"
    node.conf.write_text(node.conf.read_text().replace(line, ""))
    before = node.conf.read_bytes()

    with pytest.raises(InstallError, match=r"writes once.*scontrol reconfigure") as refused:
        install(node)

    assert f"    {line.strip()}" in refused.value.page
    assert not [one for one in refused.value.page if "Prolog" in one]
    assert node.conf.read_bytes() == before


@pytest.mark.slow
def test_a_line_of_the_sites_is_not_edited_and_both_are_shown(node: SlurmNode) -> None:
    """Its comment was dropped."""
    with node.conf.open("a") as file:
        file.write("requeueexit = 75 # ours\n")
    node.set_in_force("RequeueExit", "75")
    before = node.conf.read_bytes()

    with pytest.raises(InstallError, match="sets RequeueExit already") as refused:
        install(node)

    assert "    requeueexit = 75 # ours" in refused.value.page
    assert "    RequeueExit=75,213" in refused.value.page
    assert node.conf.read_bytes() == before


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
        (included, r"more.conf sets RequeueExit already"),
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
