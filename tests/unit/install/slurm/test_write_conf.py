# SPDX-License-Identifier: Apache-2.0
"""slurm.conf: the lines that are shown, or one block of `--write-conf`; nothing is put back."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpulock.install.files import InstallError
from gpulock.install.slurm import site
from gpulock.install.slurm.conf_block import BEGIN, END, block_lines, split_slurm_conf
from gpulock.install.slurm.conf_item import list_busy_nodes
from gpulock.install.slurm.site import Slurmd, split_nodes
from gpulock.install.slurm.wanted import INSTALL_FIRST
from tests.support.faults import returning
from tests.support.install_site import harm, tree
from tests.support.slurm_node import SlurmNode, told

CONF = Path("/etc/slurm/slurm.conf")
LINES = ["RequeueExit=213", "Prolog=/x/current/prolog/slurm"]


@pytest.mark.parametrize("text", ["A=1\n", "A=1", "", "A=1 \\\n", "\ufeffA=1\r\n"])
def test_a_block_at_the_head_is_taken_out_to_the_byte_whatever_the_file_is(text: str) -> None:
    """At the end a backslash in the last line took the first line of the block."""
    written = split_slurm_conf(CONF, text).with_lines(LINES)
    assert written == "".join(f"{line}\n" for line in block_lines(LINES)) + text

    again = split_slurm_conf(CONF, f"{written}B=2\n")

    assert again.lines == tuple(LINES)
    assert again.with_lines([]) == f"{text}B=2\n"
    assert split_slurm_conf(CONF, text).with_lines([]) == text


def test_a_block_that_was_moved_is_at_the_head_again_once_its_lines_change() -> None:
    block, other = ["".join(f"{line}\n" for line in block_lines(one)) for one in (LINES, LINES[1:])]
    moved = f"A=1\n{block}B=2\n"

    assert split_slurm_conf(CONF, moved).rest == "A=1\nB=2\n"
    assert split_slurm_conf(CONF, moved).with_lines(LINES[1:]) == f"{other}A=1\nB=2\n"
    with pytest.raises(InstallError, match="ends in a backslash: take it out"):
        split_slurm_conf(CONF, f"A=1 \\\n{block}B=2\n")


BLOCK = "".join(f"{line}\n" for line in block_lines(LINES))


@pytest.mark.parametrize(
    "text",
    [
        *(f"{BEGIN}\nA=1\n", f"{END}12\n{BEGIN}\n", BLOCK + BLOCK, f"{BEGIN}\n{END}12\n"),
        BLOCK.replace("213", "213 # ours"),
        BLOCK.replace(f"{LINES[0]}\n", ""),
        BLOCK.replace(END, f"# a comment\n{END}"),
        BLOCK.replace("\n", "\n\n", 1),
    ],
)
def test_a_block_that_somebody_changed_is_for_a_person(text: str) -> None:
    with pytest.raises(InstallError, match="somebody changed gpulock's block: put it back, or"):
        split_slurm_conf(CONF, text)


@pytest.mark.parametrize(
    ("fields", "busy"),
    [
        ("GresUsed=gpu:0 State=IDLE", False),
        ("GresUsed=gpu:h200:2(IDX:0-1) State=MIXED", True),
        ("GresUsed=gpu:a:0(IDX:N/A),gpu:b:1(IDX:3) State=MIXED", True),
        ("GresUsed=gpu:0,shard:3(3/4,0/4) State=MIXED", True),
        ("GresUsed=gpu:0,nvme:3 State=MIXED", False),
        ("GresUsed=gpu:0 State=IDLE+COMPLETING", True),
        ("GresUsed=gpu:0 State=DOWN Reason=COMPLETING", False),
        ("Gres=gpu:8 State=IDLE", False),
    ],
)
def test_a_node_is_busy_while_slurms_jobs_hold_gpus_or_end(fields: str, busy: bool) -> None:
    assert list_busy_nodes(f"NodeName=n1 {fields}\n") == ["n1"] * busy


SHOWN = """NodeName=gpu1 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=dgx1.site Version=24.11.5
NodeName=dgx2 Arch=x86_64 NodeAddr=dgx2 NodeHostName=dgx2 Version=24.11.5
NodeName=new State=FUTURE
"""


@pytest.mark.parametrize(
    ("named", "host", "own", "others"),
    [
        ("gpu1", "dgx1", ["gpu1"], ["dgx2", "new"]),
        ("", "dgx1.site", ["gpu1"], ["dgx2", "new"]),
        ("", "dgx2", ["dgx2"], ["gpu1", "new"]),
        ("", "new", ["new"], ["gpu1", "dgx2"]),
        ("", "controller", [], ["gpu1", "dgx2", "new"]),
    ],
)
def test_the_nodes_of_this_machine_are_not_others(
    named: str, host: str, own: list[str], others: list[str]
) -> None:
    """A slurmd without -N goes by the machine's name, as Debian's service starts it."""
    assert split_nodes(SHOWN, named, host) == (own, others)


def install(node: SlurmNode, **changes: bool) -> None:
    assert node.install(write_conf=True, **changes).clauses() == []


def block_of(node: SlurmNode) -> list[str]:
    """Return the lines between the marks, with them."""
    lines = split_slurm_conf(node.conf, node.conf.read_text()).lines
    return block_lines(lines or ())


@pytest.mark.slow
def test_what_is_written_is_in_force_and_owner_and_mode_stay(node: SlurmNode) -> None:
    node.conf.chmod(0o664)
    before, there = node.conf.read_text(), {*node.conf.parent.iterdir()}
    node.conf.with_name(".slurm.conf.4711.0123456789ab").touch()  # of a run that was killed

    install(node)

    assert node.conf.read_text().endswith(before)
    assert f"TaskProlog={node.paths.slurm_task}" in block_of(node)
    assert f"Prolog = {node.paths.slurm_prolog}" in (node.state / "config").read_text()
    assert node.conf.stat().st_mode & 0o777 == 0o664
    assert {*node.conf.parent.iterdir()} == there, "a copy is something to put back"
    assert node.differences(write_conf=True) == []
    (left,) = node.uninstall().remainders  # without --write-conf the block is only named
    assert [*left.page] == [f"from {node.conf}: {line}" for line in block_of(node)]


@pytest.mark.slow
def test_the_epilog_stays_in_slurm_conf_while_jobs_hold_gpus(node: SlurmNode) -> None:
    install(node)
    shown = node.state / "node"
    idle = shown.read_text()
    shown.write_text(idle.replace("   Gres=gpu:8", "   Gres=gpu:8 GresUsed=gpu:1(IDX:0)"))

    left = node.uninstall(write_conf=True)

    assert left.clauses() == ["Epilog stays while Slurm's jobs hold GPUs on node1"]
    assert block_of(node)[1:-1] == [f"Epilog={node.paths.slurm_epilog}", "PrologFlags=Contain"]
    assert node.paths.slurm_epilog.is_file()
    assert node.uninstall(write_conf=True).changed == []

    shown.write_text(idle)
    assert node.uninstall(write_conf=True).clauses() == []
    assert BEGIN not in node.conf.read_text()


@pytest.mark.slow
def test_a_file_that_is_written_but_not_in_force_is_put_in_force_by_the_next_run(
    node: SlurmNode,
) -> None:
    """The installer was killed before it told slurmctld, or slurmctld reads another file."""
    (node.state / "elsewhere").touch()
    says = r"slurmctld does not go by .*slurm.conf: make the same change there"
    with pytest.raises(InstallError, match=says):
        install(node)

    (node.state / "elsewhere").unlink()
    install(node)

    assert f"Prolog = {node.paths.slurm_prolog}" in (node.state / "config").read_text()
    with node.conf.open("a") as file:  # a comment and a key with such an end are no hook
        file.write("# Prolog= and Epilog= were gpulock's\nXTaskProlog=/site/x\n")
    (node.state / "elsewhere").touch()
    with pytest.raises(InstallError, match=says):
        node.uninstall(write_conf=True, force=True)


@pytest.mark.slow
def test_a_line_that_stands_once_more_below_the_block_goes_from_the_block(node: SlurmNode) -> None:
    """Newer releases run a Prolog that stands twice twice."""
    install(node)
    own = f"Prolog={node.paths.slurm_prolog}"
    with node.conf.open("a") as file:
        file.write(f"{own}\n")

    install(node)

    assert own not in block_of(node) and node.conf.read_text().endswith(f"\n{own}\n")
    assert f"Epilog={node.paths.slurm_epilog}" in block_of(node)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "says"),
    [
        ("echo NodeName=node2 Arch=x >>slurm/state/node", r"other nodes .*node2.*--installed-e"),
        ("echo Prolog=/site/prolog >>etc-slurm/slurm.conf", "Prolog=/site/prolog is to run beside"),
        ("touch slurm/state/down", "Unable to contact slurm controller"),
        (
            "sed -i '1i# Ansible managed' etc-slurm/slurm.conf",
            r"says `# Ansible managed`: put .* template;.*comment",
        ),
        (
            "cd etc-slurm; echo 'RequeueExit = 75 # ours' >more.conf;"
            " echo Include more.conf >>slurm.conf;"
            " sed -i 's/^RequeueExit .*/RequeueExit = 75/' ../slurm/state/config",
            r"more.conf sets RequeueExit already",
        ),
    ],
)
def test_what_a_person_has_to_decide_changes_nothing(
    node: SlurmNode, plant: str, says: str
) -> None:
    harm(node.root, plant)
    before = node.conf.read_bytes()

    with pytest.raises(InstallError, match=says) as refused:
        install(node)

    assert node.conf.read_bytes() == before
    if page := refused.value.page:
        assert "    RequeueExit = 75 # ours" in page, "the site's line, and what it is to be"
        assert "    RequeueExit=75,213" in page


def test_a_file_that_slurmd_fetched_is_not_written(
    node: SlurmNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpulock.install.slurm.conf_item.FETCHED_CONF", node.conf)
    before = node.conf.read_text()

    with pytest.raises(InstallError, match="is not the cluster's own: run it with --write-conf wh"):
        install(node)

    assert node.conf.read_text() == before


@pytest.mark.slow
@pytest.mark.parametrize("has_program", [False, True])
def test_a_controller_that_is_no_node_gets_the_block_and_nothing_else(
    node: SlurmNode, monkeypatch: pytest.MonkeyPatch, has_program: bool
) -> None:
    """There `slurmd -G` knows no such node, or nobody installed slurmd."""
    make_controller(node, monkeypatch, has_program)
    before, there = node.conf.read_text(), tree(node.root)
    with pytest.raises(InstallError, match=r"other nodes have this .*node1.*everywhere"):
        install(node)

    install(node, installed_everywhere=True)

    written = node.conf.read_text()
    assert written.endswith(before) and f"Prolog={node.paths.slurm_prolog}" in block_of(node)
    assert f"Prolog = {node.paths.slurm_prolog}" in (node.state / "config").read_text()
    made = {path for path, text in tree(node.root).items() if there.get(path) != text}
    assert made == {"etc-slurm/slurm.conf", "slurm/state/config"}
    assert node.differences(write_conf=True, installed_everywhere=True) == []
    with pytest.raises(InstallError, match="NodeName" if has_program else "install slurmd"):
        node.install()

    assert node.uninstall(write_conf=True).clauses() == []
    assert node.conf.read_text() == before


def make_controller(node: SlurmNode, patch: pytest.MonkeyPatch, has_program: bool) -> None:
    """Make it another machine than node1, on which slurmctld runs and no slurmd."""
    patch.setattr(site, "find_slurmds", returning(list[Slurmd]()))
    patch.setattr("os.uname", lambda: SimpleNamespace(nodename="head.site"))
    node.set(SLURM_BINARIES=str(node.root / "slurm/bin"), SLURM_CONF=str(node.conf))
    if has_program:
        (node.state / "no_node").touch()
    else:
        (node.root / "slurm/sbin/slurmd").unlink()


# --- whatever is installed, edited and uninstalled, in any order: the text of the site stays ------

STEPS = 12


class Site:
    """A node whose administrator writes to slurm.conf between the runs of gpulock."""

    def __init__(self, node: SlurmNode, seed: int) -> None:
        self.node, self.draw = node, random.Random(seed)
        node.conf.write_bytes(node.conf.read_bytes() + b"# R\xe4ume\r\n")  # no UTF-8
        self.text = self.read()  # what stands outside of gpulock's block

    def read(self) -> str:
        """Return the file, whatever bytes are in it."""
        return self.node.conf.read_bytes().decode("utf-8", "surrogateescape")

    def edit(self, change: Callable[[str], str]) -> None:
        """Change what is the site's; the block stays where it is."""
        lines = split_slurm_conf(self.node.conf, self.read()).lines or ()
        self.text = change(self.text)
        text = split_slurm_conf(self.node.conf, self.text).with_lines(lines)
        self.node.conf.write_bytes(text.encode("utf-8", "surrogateescape"))

    def step(self) -> None:
        """Do one thing; nothing of it may touch what is the site's."""
        node, number = self.node, self.draw.randrange(1 << 16)
        self.draw.choice(
            [
                node.install,
                lambda: node.install(write_conf=True),
                lambda: node.install(write_conf=True, installed_everywhere=True),
                node.uninstall,
                lambda: node.uninstall(write_conf=True),
                lambda: node.uninstall(write_conf=True, force=True),
                lambda: self.edit(lambda text: f"{text}NodeName=n{number} CPUs=4  # a rack\n"),
                lambda: self.edit(lambda text: f"# of March {number}\n{text}"),
                lambda: self.edit(lambda text: text.rstrip("\n")),
                node.reconfigure,
            ]
        )()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_what_is_not_gpulocks_stays_to_the_byte(node: SlurmNode, seed: int) -> None:
    site = Site(node, seed)
    for _ in range(STEPS):
        site.step()
        assert split_slurm_conf(node.conf, site.read()).rest == site.text

    assert node.uninstall(write_conf=True).clauses() == []
    assert site.read() == site.text
    assert not node.hooks.exists() and not node.map.exists()
    assert node.uninstall(write_conf=True).changed == []


# --- what the administrator is told to put into slurm.conf ----------------------------------------


def test_a_cluster_without_hooks_is_given_the_lines(node: SlurmNode) -> None:
    (left,) = node.install().remainders

    assert [*left.page] == [
        "Into slurm.conf, the same on every node and at the controller:",
        "",
        f"    Prolog={node.paths.slurm_prolog}",
        f"    TaskProlog={node.paths.slurm_task}",
        f"    Epilog={node.paths.slurm_epilog}",
        "    # a job's extern step proves that it lives",
        "    PrologFlags=Contain",
        "    # a job that finds no GPU waits again",
        "    RequeueExit=213",
        "",
        *INSTALL_FIRST,
        "",
        "Then, at the controller: scontrol reconfigure (no restart is needed).",
    ]


def test_the_sites_own_values_are_kept_and_its_hooks_named_with_the_page(node: SlurmNode) -> None:
    values = {"RequeueExit": "75,80-82", "PrologFlags": "Alloc,NoHold", "PrologEpilogTimeout": "30"}
    for key, value in {**values, "Prolog": "/site/prolog", "TaskProlog": "/site/task"}.items():
        node.put(key, value)

    text = told(node)

    for said in (
        "waits again\n    RequeueExit=75,80-82,213\n",
        "# now: Alloc,NoHold; a job's extern step proves",
        "lives\n    PrologFlags=Alloc,Contain\n",
        "# now: 30; a hook may take 95 s",
        "\nProlog=/site/prolog is the site's: take it out if it hands out GPUs itself,\n"
        f"else let {node.paths.slurm_prolog} run beside it: see",
        "\nTaskProlog=/site/task is the site's",
        f"\n    Epilog={node.paths.slurm_epilog}\n",
    ):
        assert said in text
    assert "\n    Prolog=" not in text and "\n    TaskProlog=" not in text
