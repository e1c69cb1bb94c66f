# SPDX-License-Identifier: Apache-2.0
"""The SPANK plugin: what it gives the hook, how it is compiled, which lines name it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from gpulock.install.drop_env import find_compiler
from gpulock.install.files import find_share_folder
from gpulock.install.slurm.slurm_conf import SlurmConf
from gpulock.install.slurm.spank import FOLDER, PlugStack, build_mark
from gpulock.job.environment import BIND_LISTS, CONTAINER_PREFIXES
from gpulock.job.mps import LOG_DIRECTORY, PIPE_DIRECTORY
from gpulock.slurm import task
from tests.support.slurm_node import SlurmNode, told

# What the plugin calls of Slurm's own header.
SPANK_HEADER = """
typedef struct spank_handle *spank_t;
enum { ESPANK_SUCCESS, S_CTX_REMOTE, S_JOB_ENV };
int spank_get_item(spank_t, int, ...);
int spank_setenv(spank_t, const char *, const char *, int);
int spank_unsetenv(spank_t, const char *);
int spank_context(void);
void slurm_error(const char *, ...);
#define SPANK_PLUGIN(name, version) const char plugin_name[] = #name;
"""


def given() -> set[str]:
    """Return the names that the plugin gives to the hook."""
    source = find_share_folder() / FOLDER / "spank_gpulock.c"
    block = source.read_text().partition("given[] = {")[2].partition("};")[0]
    return set(re.findall(r'"(\w+)="', block))


def test_the_hook_is_given_every_name_that_it_reads() -> None:
    text = "".join(
        Path(f"{Path(task.__file__).parent}/{name}.py").read_text()
        for name in ("task", "task_devices")
    )
    asked = set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', text)) | {"CUDA_VISIBLE_DEVICES"}
    asked |= set(re.findall(r'"(\w+)" in environ', text))
    assert {"SLURMD_NODENAME", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"} <= asked
    asked |= {f"{twin}{PIPE_DIRECTORY}" for twin in ("", *CONTAINER_PREFIXES)}
    assert asked | {LOG_DIRECTORY, *BIND_LISTS} == given()


def make(node: SlurmNode) -> str:
    """Run the command that the installer prints, with a header of Slurm's; return its errors."""
    path = node.root / "slurm/include/slurm/spank.h"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SPANK_HEADER)
    node.stack(node.spank_lines[1])
    left = node.install().remainders[0]
    assert left.clause == f"{node.plugin} is not there, or is of another gpulock"
    command = next(line.strip() for line in left.page if line.strip().startswith("make -C"))
    command += f" SLURM={node.root}/slurm"
    env = {**os.environ, "CC": shlex.join(find_compiler())}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, env=env)
    return done.stderr


@pytest.mark.slow
def test_it_is_compiled_by_the_command_that_is_printed_and_goes_with_the_hooks(
    node: SlurmNode,
) -> None:
    assert make(node) == ""

    assert b"\0slurm_spank_task_init\0" in node.plugin.read_bytes()
    assert str(node.paths.slurm_task).encode() in node.plugin.read_bytes()
    (left,) = [one for one in node.install().remainders if "plugstack.conf" in one.clause]
    assert f"    required {node.plugin}" in left.page
    assert "TaskProlog=" not in told(node)
    node.stack(*node.spank_lines)
    assert not [one for one in node.install().clauses() if "plugstack.conf" in one]
    (left,) = node.uninstall().remainders
    assert left.clause.startswith("Slurm still starts the hooks")
    assert [line for line in left.page if line.endswith("spank_gpulock.so again")]
    assert node.plugin.exists()
    node.stack()
    assert node.uninstall().clauses() == []
    assert not node.hooks.exists()


@pytest.mark.slow
def test_task_prolog_is_not_asked_for_where_the_plugin_runs_the_same_hook(node: SlurmNode) -> None:
    node.stack(node.spank_lines[1])

    plugin, conf = node.install().clauses()

    assert plugin.endswith("spank_gpulock.so is not there, or is of another gpulock")
    assert "slurm.conf lacks Prolog, Epilog" in conf
    node.give_plugin()
    node.stack(*node.spank_lines)
    node.put_hooks()
    node.put("TaskProlog", "(null)")
    assert node.install().clauses() == []
    node.plugin.write_bytes(b"\x7fELF something")
    (left,) = node.install().clauses()
    assert left.endswith("is of another gpulock")


# --- plugstack.conf ----------------------------------------------------------------------------

PLUGIN = Path("/usr/lib/gpulock/hooks/spank_gpulock.so")
ABOVE = f"required {PLUGIN}"
BELOW = f"required {PLUGIN} again"
PYXIS = "required /usr/lib/slurm/spank_pyxis.so runtime_path=/run/pyxis"
OTHER = "optional /opt/auks.so"


def stack(folder: Path, *lines: str) -> PlugStack:
    (folder / "plugstack.conf").write_text("".join(f"{line}\n" for line in lines))
    return PlugStack(SlurmConf({}), folder / "slurm.conf")


def test_lines_are_found_in_included_files_and_where_slurm_conf_says(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/20.conf").write_text(f"{PYXIS}  # containers\n")
    (tmp_path / "d/10.conf").write_text("include more/*\ninclude none\n")
    found = stack(
        tmp_path, f"#{ABOVE}", "include d/*.conf", BELOW, "include none/*", "include gone"
    )
    assert found.naming("spank_pyxis") == [(tmp_path / "d/20.conf", PYXIS)]
    assert found.naming(PLUGIN.name) == [(tmp_path / "plugstack.conf", BELOW)]
    (tmp_path / "other").write_text(f"{OTHER}\n")
    named = SlurmConf({"plugstackconfig": str(tmp_path / "other")})
    assert PlugStack(named, tmp_path / "slurm.conf").lines == [(tmp_path / "other", OTHER)]
    assert PlugStack(SlurmConf({}), tmp_path / "none/slurm.conf").lines == []


WHOLE: list[tuple[str, ...]] = [(ABOVE, PYXIS, BELOW.replace(" ", "\t ")), (OTHER, ABOVE)]
LACKING: list[tuple[str, ...]] = [
    *((), (PYXIS, ABOVE), (BELOW, PYXIS), (f"optional {PLUGIN}", PYXIS, BELOW)),
    ("required /old/spank_gpulock.so", PYXIS, BELOW),
]


def test_what_is_missing_is_shown_whole(tmp_path: Path) -> None:
    plugin, hook = tmp_path / PLUGIN.name, Path("/hooks/slurm-task")

    def left(*lines: str) -> list[str] | None:
        found = stack(tmp_path, *(line.replace(str(PLUGIN), str(plugin)) for line in lines))
        told = found.remainder(plugin, hook)
        page = told.page if told else ()
        return [line.strip() for line in page if line.startswith("    ")][1:] if told else None

    wanted = [f"required {plugin}", f"required {plugin} again"]
    assert left(*WHOLE[0]) == wanted, "it is not made"
    plugin.write_bytes(b"\x7fELF " + build_mark(hook))
    plugin.chmod(0o644)
    assert [left(*lines) for lines in WHOLE] == [None, None]
    assert [left(OTHER, *lines) for lines in LACKING] == [wanted] * len(LACKING)


def test_a_plugin_that_others_may_write_is_named(tmp_path: Path) -> None:
    """slurmd loads it as root, whoever may write it."""
    plugin, hook = tmp_path / PLUGIN.name, Path("/hooks/slurm-task")
    found = stack(tmp_path, *(line.replace(str(PLUGIN), str(plugin)) for line in WHOLE[0]))
    plugin.write_bytes(build_mark(hook))
    plugin.chmod(0o666)

    left = found.remainder(plugin, hook)

    assert left and f"{plugin} is writable by others" in left.clause
    plugin.chmod(0o644)
    assert found.remainder(plugin, hook) is None
