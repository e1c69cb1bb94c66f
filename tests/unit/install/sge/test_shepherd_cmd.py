# SPDX-License-Identifier: Apache-2.0
"""`prolog/sge_shepherd` starts no shepherd whose config a job's own text has forged."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings  # noqa: TID251 (a count alone)
from hypothesis import strategies as st

from gpulock.install.hooks import render_hooks
from gpulock.sge.prolog import LAUNCHER_MARKER
from tests.support.scripts import write_script

pytestmark = pytest.mark.slow  # a shell each

RECORDED = Path(__file__).parents[3] / "support/data/sge-8.1.9"
CONFIGS = ("array", "parallel")
DAEMONS = ("qlogin_daemon", "rlogin_daemon")
STARTED = "the shepherd was started"
# common/execution_states.h: the job is in error, started again, deleted; the queue goes on
APPERROR, AGAIN, DELETED = 30, 25, 100
Edit = Callable[[str], str]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the launcher, with a shepherd that shows its environment."""
    folder = tmp_path_factory.mktemp("a launcher")
    shepherd = folder / "shepherd"
    write_script(shepherd, f"tr '\\0' '\\n' </proc/$$/environ\necho {STARTED}")
    config = folder / "gpulock.conf"
    config.write_text(f"SGE_SHEPHERD={shepherd}\n")  # a path with a blank
    return render_hooks(folder / "hooks", config).folder / "prolog/sge_shepherd"


def start(launcher: Path, folder: Path, config: str, shell: str = "") -> tuple[int, str]:
    """Start the launcher as execd does; return its exit code and what was written."""
    (folder / "config").write_text(config, errors="surrogateescape")
    words = [*([shell] if shell else []), str(launcher)]
    done = subprocess.run(
        words, cwd=folder, env={}, capture_output=True, check=False, timeout=60, text=True
    )
    return done.returncode, done.stdout


def recorded(name: str, ocs: bool = False, **values: object) -> str:
    """Return a config that execd wrote, with other values, or as Open Cluster Scheduler does."""
    config = (RECORDED / f"{name}.config").read_text()
    for key, value in values.items():
        config = re.sub(rf"(?m)^{key}=.*$", f"{key}={value}", config)
    return re.sub(r"(?m)^enable_windomacc=.*\n", "", config) if ocs else config


def copied(
    launcher: Path, folder: Path, shepherd: object = None, slave: str = "#!/bin/sh\n"
) -> Path:
    """Return a copy of the launcher, with another shepherd perhaps, beside a hook of tasks."""
    mine, text = folder / "sge_shepherd", launcher.read_text()
    if shepherd is not None:
        text = re.sub(r"(?m)^SHEPHERD=.*$", f"SHEPHERD={shepherd}", text)
    for path, written in ((mine, text), (folder / "sge-slave", slave)):
        path.write_text(written)
        path.chmod(0o755)
    return mine


def spool(folder: Path, place: str) -> Path:
    """Make the folder of a job or of a task."""
    made = folder / "active_jobs" / place
    made.mkdir(parents=True)
    return made


def behind(key: str, text: str) -> Edit:
    """Put a job's own text behind the value of a line."""

    def edit(config: str) -> str:
        head, found, tail = config.partition(f"\n{key}=")
        assert found
        value, _, rest = tail.partition("\n")
        return f"{head}{found}{value}{text}\n{rest}"

    return edit


def with_arguments(*values: str) -> Edit:
    """Give the job arguments."""
    lines = "".join(f"job_arg{n}={value}\n" for n, value in enumerate(values, 1))
    given = f"njob_args={len(values)}\n{lines}"
    return lambda config: re.sub(
        r"(?m)^njob_args=.*\n(job_arg.*\n)*", given.replace("\\", r"\\"), config
    )


def in_front_and_behind(front: str, end: str) -> Edit:
    """Put text around all of it."""
    return lambda config: f"{front}{config}{end}"


def in_front_of(key: str, *lines: str) -> Edit:
    """Put lines in front of another."""
    text = "".join(f"\n{line}" for line in lines)
    return lambda config: config.replace(f"\n{key}=", f"{text}\n{key}=")


def control_port(real: str, *forged: str) -> Edit:
    """Give a qrsh the port of its client, behind which a line may be forged."""
    lines = ("master_host=m", "commd_port=-1", "qrsh_control_port=h:1", *forged, f"{real}=builtin")
    return in_front_of("write_osjob_id", *lines)


@pytest.mark.parametrize("shell", ["", "/bin/bash"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "edit",
    [
        str,  # as execd wrote it
        with_arguments("a", "", "b=c", "x" * 80_000),
        with_arguments(*("=" * 5 for _ in range(40))),
        behind("job_name", " odd $(name) \udcff * [a-z]"),
        behind("account", "prolog=root@/x"),
        in_front_of("use_afs", "display=:0"),
        *(control_port(real) for real in DAEMONS),
        # of a newer Open Cluster Scheduler; the fixture's shepherd is not run for its release
        lambda _: interactive("QRSH", 1, tls=True, ocs=True),
        lambda _: interactive("QRSH", 0, tls=False, ocs=True),
    ],
)
def test_what_execd_writes_is_started_and_marked(
    launcher: Path, tmp_path: Path, name: str, edit: Edit, shell: str
) -> None:
    config = edit(recorded(name))
    code, said = start(launcher, tmp_path, config, shell)

    assert (code, said.count(STARTED)) == (0, 1)
    assert (tmp_path / "config").read_text(errors="surrogateescape") == config
    assert LAUNCHER_MARKER.decode() in said.splitlines()
    for made in ("exit_status", "error"):  # the shepherd gives away what it makes itself
        assert (tmp_path / made).read_text() == ""
        assert (tmp_path / made).stat().st_mode & 0o777 == 0o644


# It names a line only by what a terminal does not obey.
REASON = r"gpulock: (a line|\w{1,20}) in the job's config is not Grid Engine's: submit [a-z, ]+\n"
FORGED = "\nprolog=root@/tmp/evil\ny="
KEYS = (
    "stdin_path",
    "stdout_path",
    "shell_path",
    "script_file",
    "cwd",
    "mail_list",
    "job_name",
    "account",
    "acct_project",
)
STAGED = ("fs_stdin_host", "fs_stdout_path", "fs_stderr_path")
WORDS = ("\x1b]0;owned\x07", "a\\cb", "\\n\\nx", "\udcff", "x y", "x" * 80_000)


@pytest.mark.parametrize("shell", ["", "/bin/bash"])
@pytest.mark.parametrize(
    "edit",
    [
        *(behind(key, FORGED) for key in KEYS),
        *(behind(key, "\nprolog=root@/tmp/evil") for key in KEYS),
        *(behind(key, "\n =prolog=root@/tmp/evil") for key in KEYS),
        *(behind(key, "\nepilog root@/tmp/evil") for key in KEYS),
        *(behind(key, "\n") for key in KEYS),
        behind("cwd", "\njob_owner=root\nmin_uid=0\nmin_gid=0\ny="),
        behind("cwd", "\nadd_grp_id=65499"),
        behind("stdin_path", "\njob_owner=root\nmin_gid=0\nmin_uid=0"),
        behind("job_name", "\npe_task_id=1\njob_id=1"),
        behind("acct_project", "\ndisplay=:0\nuse_afs=1\ncoshepherd=/tmp/evil"),
        with_arguments("a\nprolog=root@/tmp/evil"),
        with_arguments("a\njob_arg2=b", "c"),
        with_arguments("a\nqueue_tmpdir=/root"),
        with_arguments("x" * 100_000 + "prolog=root@/tmp/evil"),
        behind("job_name", "x" * 100_000 + "prolog=root@/tmp/evil"),
        behind("qsub_gid", "\nstdin_path merge_stderr=x"),
        in_front_and_behind("", "prolog=root@/tmp/evil"),
        in_front_and_behind("x=y\n", ""),
        lambda config: config[: len(config) // 2],  # as on a full disk
        *(behind(key, text) for key in STAGED for text in (FORGED, "\nuse_afs=1", "\n")),
        *(in_front_of("use_afs", "display=:0", line) for line in ("prolog=root@/x", "y", "")),
        *(control_port(real, "rsh_daemon=/tmp/evil") for real in DAEMONS),
        *(behind("cwd", f"\n{word}=y") for word in WORDS),  # which the reason does not show
    ],
)
def test_a_line_that_is_not_execds_puts_the_job_in_error(
    launcher: Path, tmp_path: Path, edit: Edit, shell: str
) -> None:
    code, said = start(launcher, tmp_path, edit(recorded("array")), shell)

    assert (code, said) == (APPERROR, "")
    assert (tmp_path / "exit_status").read_text() == f"{APPERROR}\n"
    assert re.fullmatch(REASON, (tmp_path / "error").read_text())


@pytest.mark.parametrize("text", [FORGED, "\nprolog=root@/tmp/evil", "\npe_task_id=1", "\n"])
def test_the_name_of_a_task_forges_no_line(launcher: Path, tmp_path: Path, text: str) -> None:
    """The client of `qrsh -inherit` names it, and the whole job is deleted."""
    mine, folder = copied(launcher, tmp_path), spool(tmp_path, "7.1/1.node")
    task = in_front_of("account", "pe_task_id=1.node")(recorded("array"))

    assert start(mine, folder, task)[0] == 0
    assert start(mine, folder, behind("job_name", text)(task))[0] != 0
    assert (folder / "exit_status").read_text() == f"{DELETED}\n"


USERS = frozenset((*KEYS, "fs_stdin_host", "fs_stdin_path", "stderr_path", "job_arg1"))
INSERTED = st.lists(
    st.sampled_from(recorded("array").splitlines())
    | st.sampled_from(["\n", "=", " ", "\n =", "\r", "\0", "job_arg2=b", "njob_args=2", "y"])
    | st.sampled_from(["prolog=root@/x", "job_owner=root", "min_uid=0", "x" * 89_000, " " * 99_990])
    | st.text(max_size=9),
    max_size=9,
).flatmap(lambda words: st.sampled_from(["", "\n"]).map(lambda between: between.join(words)))


def read_by_shepherd(config: bytes) -> dict[bytes, bytes]:
    """Read a config as config_file.c does: by fgets of 100,000 bytes, and the last line wins."""
    pieces = [
        line[at : at + 99_999]
        for line in re.findall(rb"[^\n]*\n|[^\n]+", config)
        for at in range(0, len(line), 99_999)
    ]
    found: dict[bytes, bytes] = {}
    for piece in pieces:
        line = piece.split(b"\0")[0].rstrip(b"\n")
        if not line.strip(b" ="):
            break  # what stands behind it is not read
        name, _, value = line.lstrip(b" ").partition(b"=")
        found[name.split(b" ")[0]] = value
    return found


def tried(launcher: Path, folder: Path, key: str, text: str) -> None:
    """Insert a user's text: the job is refused, or each line that is not a user's is as it was."""
    good, bad = recorded("array"), behind(key, text)(recorded("array"))
    code, _ = start(launcher, folder, bad)
    if code:
        return
    (before, after) = (
        read_by_shepherd(one.encode("utf-8", "surrogateescape")) for one in (good, bad)
    )
    told = {name: value for name, value in before.items() if name.decode() not in USERS}
    assert told == {name: value for name, value in after.items() if name.decode() not in USERS}


@settings(max_examples=30)
@given(key=st.sampled_from(sorted(USERS)), text=INSERTED)
def test_a_users_text_is_refused_or_changes_no_line_but_its_own(
    launcher: Path, tmp_path_factory: pytest.TempPathFactory, key: str, text: str
) -> None:
    tried(launcher, tmp_path_factory.mktemp("job"), key, text)


@pytest.mark.soak
@pytest.mark.timeout(14_400)
@settings(max_examples=20_000)
@given(key=st.sampled_from(sorted(USERS)), text=INSERTED)
def test_no_text_of_a_user_in_thousands_changes_another_line(
    launcher: Path, tmp_path_factory: pytest.TempPathFactory, key: str, text: str
) -> None:
    tried(launcher, tmp_path_factory.mktemp("job"), key, text)


def test_a_config_that_cannot_be_read_starts_nothing(launcher: Path, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    done = subprocess.run([launcher], cwd=tmp_path, env={}, check=False, timeout=60)

    assert done.returncode == APPERROR
    shutil.rmtree(tmp_path / "config")


def test_only_the_folder_where_it_is_started_is_read(launcher: Path, tmp_path: Path) -> None:
    """Tried: a `config` that a user has near: above, below, at home, in what CDPATH names."""
    spool, user = tmp_path / "spool", tmp_path / "user"
    for folder in (spool, spool / "home", user):
        folder.mkdir()
        (folder / "config").write_text(recorded("array"))
    (tmp_path / "config").write_text(recorded("array"))
    (spool / "config").unlink()
    env = {"CDPATH": str(user), "PWD": str(user), "OLDPWD": str(user), "HOME": str(user)}
    done = subprocess.run([launcher], cwd=spool, env=env, check=False, timeout=60)

    assert done.returncode == APPERROR
    assert "is not Grid Engine's" in (spool / "error").read_text()
    assert not (user / "exit_status").exists()


@pytest.mark.parametrize("shell", ["", "/bin/bash"])
@pytest.mark.parametrize("fault", ["not known", "missing", "mode", "interpreter", "format"])
@pytest.mark.parametrize(("place", "code"), [("7.1", AGAIN), ("7.1/1.node", DELETED)])
def test_a_shepherd_that_cannot_be_started_loses_no_job(
    launcher: Path, tmp_path: Path, fault: str, shell: str, place: str, code: int
) -> None:
    """The shell ended with 127, which execd took for a shepherd's own: the job was gone."""
    shepherd = tmp_path / "elsewhere/sge_shepherd"
    shepherd.parent.mkdir()
    if fault != "missing":
        shepherd.write_bytes({"format": b"\x7fELF\2\1\1x"}.get(fault, b"#!/no/such\n"))
        shepherd.chmod(0o644 if fault == "mode" else 0o755)
    mine = copied(launcher, tmp_path, "" if fault == "not known" else shepherd)
    folder = spool(tmp_path, place)

    ended, said = start(mine, folder, recorded("array"), shell)

    assert (ended, said) == (code, "")
    assert (folder / "exit_status").read_text() == f"{code}\n"
    assert "sge_shepherd cannot be started" in (folder / "error").read_text()


@pytest.mark.parametrize("shell", ["", "/bin/bash"])
@pytest.mark.parametrize(
    ("hook", "code"), [("#!/no/such\n", 12), (None, 12), ("#!/bin/sh\nexit 1\n", 1)]
)
def test_a_task_whose_hook_cannot_start_says_so_and_no_client_waits(
    launcher: Path, tmp_path: Path, hook: str | None, code: int, shell: str
) -> None:
    """Its client waited for 60 s and learned nothing, nor did anybody else."""
    mine, folder = copied(launcher, tmp_path, slave=hook or ""), spool(tmp_path, "7.1/1.node")
    slave = tmp_path / "sge-slave"
    if hook is None:
        slave.unlink()

    ended, said = start(mine, folder, recorded("array"), shell)

    assert (ended, said) == (DELETED, "")
    assert (folder / "exit_status").read_text() == f"{DELETED}\n"
    assert f"{slave} ended with {code}" in (folder / "error").read_text()


def interactive(script: str, pty: int, tls: bool, ocs: bool, admin: str = "sgeadmin") -> str:
    """Return the config of a qrsh, of Open Cluster Scheduler 9.1 where it has a line `tls`."""
    lines = recorded("array", ocs, script_file=script, pty=pty, admin_user=admin)
    return re.sub(r"(?m)^csp=.*$", "tls=0", lines) if tls else lines


def launcher_of_release(launcher: Path, folder: Path, release: str) -> Path:
    """Return a launcher whose shepherd is of a release."""
    shepherd = folder / "elsewhere/sge_shepherd"
    shepherd.parent.mkdir()
    write_script(shepherd, f"echo '{release}'\necho usage")
    return copied(launcher, folder, shepherd)


@pytest.mark.parametrize("shell", ["", "/bin/bash"])
@pytest.mark.parametrize(
    ("release", "script", "tls", "changed"),
    [
        ("OCS 9.1.5prealpha", "QRSH", True, True),
        ("nothing", "QRLOGIN", True, True),
        ("OCS 9.0.13", "QRSH", False, True),
        ("OCS 9.0.9", "qlogin", False, True),
        ("OCS 9.0.8", "QRSH", False, False),
        ("SGE 8.1.9", "QRSH", False, False),
        ("SGE r.", "QRSH", False, False),
        ("OCS 9.1.5", "/bin/QRSH", True, False),
    ],
)
def test_a_qrsh_without_terminal_gets_the_form_that_a_prolog_does_not_break(
    launcher: Path, tmp_path: Path, release: str, script: str, tls: bool, changed: bool, shell: str
) -> None:
    mine = launcher_of_release(launcher, tmp_path, release)
    config = interactive(script, 0, tls, ocs=not release.startswith("SGE"))

    assert start(mine, tmp_path, config, shell)[0] == 0
    assert (tmp_path / "config").read_text() == config + ("pty=2\n" if changed else "")


@pytest.mark.parametrize("shell", ["", "/bin/bash"])
@pytest.mark.parametrize(
    ("release", "script", "pty", "admin", "refused"),
    [
        ("SGE 8.1.9", "QRSH", 1, "sgeadmin", True),
        ("SGE 8.1.9", "QRLOGIN", 2, "sgeadmin", True),
        ("SGE r273.05d828f", "QLOGIN", 2, "gridadm", True),
        ("SGE 8.1.9", "/bin/job", 1, "sgeadmin", True),  # qsub -pty y
        ("SGE 8.1.9", "/bin/job", 0, "sgeadmin", False),
        ("SGE 8.1.9", "QRSH", 1, "none", False),
        ("SGE 8.1.9", "QRSH", 1, "root", False),
        ("OCS 9.0.3", "QRSH", 1, "sgeadmin", False),
        ("OCS 9.1.5", "QLOGIN", 2, "sgeadmin", False),
    ],
)
def test_a_job_on_a_terminal_that_would_stop_the_queue_is_refused(
    launcher: Path, tmp_path: Path, release: str, script: str, pty: int, admin: str,
    refused: bool, shell: str,
) -> None:  # fmt: skip
    """Its prolog was ended by SIGTERM, and the queue was in error (facts, hooks of such jobs)."""
    mine = launcher_of_release(launcher, tmp_path, release)
    ocs = release.startswith("OCS")
    config = interactive(script, pty, tls=False, ocs=ocs, admin=admin)

    assert start(mine, tmp_path, config, shell)[0] == (APPERROR if refused else 0)
    if refused:
        assert "use qrsh -pty no COMMAND" in (tmp_path / "error").read_text()
        assert (tmp_path / "exit_status").read_text() == f"{APPERROR}\n"
    else:
        assert (tmp_path / "config").read_text() == config


@pytest.mark.parametrize("hook", ["prolog", "epilog", "pe_start", "pe_stop"])
def test_a_job_on_a_terminal_that_no_hook_breaks_is_started(
    launcher: Path, tmp_path: Path, hook: str
) -> None:
    """A queue of the same host without GPUs has no hook: its terminals worked before gpulock."""
    none = "NONE"
    free = recorded("parallel", pty=1, prolog=none, epilog=none, pe_start=none, pe_stop=none)
    one = free.replace(f"\n{hook}=NONE\n", f"\n{hook}=/site/hook\n")

    assert start(launcher, tmp_path, free)[0] == 0
    assert (tmp_path / "config").read_text() == free
    assert start(launcher, tmp_path, one)[0] == APPERROR
    assert "use qrsh -pty no COMMAND" in (tmp_path / "error").read_text()


@pytest.mark.root
@pytest.mark.parametrize(
    ("soft", "hard", "there", "device"),
    [
        ("INFINITY", "INFINITY", False, False),
        ("INFINITY", "0", False, True),
        ("1M", "INFINITY", False, True),
        ("0", "0", True, False),  # no device can be made, and the shepherd starts all the same
    ],
)
def test_a_trace_has_no_size_where_files_have_a_limit(
    launcher: Path, tmp_path: Path, soft: str, hard: str, there: bool, device: bool
) -> None:
    """The owner may write it, and a shepherd's fork under the limit died at its own line there."""
    trace = tmp_path / "trace"
    if there:
        trace.write_text("of an earlier run\n")

    code, said = start(launcher, tmp_path, recorded("array", s_fsize=soft, h_fsize=hard))

    assert (code, said.count(STARTED), trace.exists()) == (0, 1, device)
    if device:
        status = trace.stat()
        assert stat.S_ISCHR(status.st_mode) and status.st_rdev == os.makedev(1, 3)


MIB = 1 << 20
NONE = "INFINITY"


@pytest.mark.parametrize("shell", ["", "/bin/bash"])
@pytest.mark.parametrize(
    ("soft", "hard", "size", "starts"),
    [
        (NONE, NONE, 5 * MIB, True),
        (NONE, NONE, 6 * MIB, False),
        (NONE, str(8 * MIB), 2 * MIB, False),
        (str(MIB), str(8 * MIB), MIB // 4, False),
        (str(8 * MIB), str(MIB), MIB // 4, False),
        ("16384", "16384", MIB // 16, True),  # the kernel leaves 128 KiB to all
        ("0", "0", MIB // 8, False),
        ("9" * 20, "18446744073709551615", 5 * MIB, True),
        (NONE, "1M", MIB // 5, True),
        ("8m", "100G", MIB, True),
        ("8192K", NONE, 2 * MIB, False),
        *((NONE, small, MIB // 4, False) for small in ("1M", "0.001G", "0x100000", "00000000001M")),
    ],
)
def test_a_job_whose_environment_starts_no_hook_is_in_error_and_its_queue_is_not(
    launcher: Path, tmp_path: Path, soft: str, hard: str, size: int, starts: bool, shell: str
) -> None:
    """Open Cluster Scheduler takes such a prolog for the fault of the queue, 8.1.9 for its own."""
    value = "x" * 1022
    (tmp_path / "environment").write_text(f"A={value}\n" * (size // 1025))

    code, said = start(
        launcher, tmp_path, recorded("array", ocs=True, s_stack=soft, h_stack=hard), shell
    )

    assert (code, STARTED in said) == ((0, True) if starts else (APPERROR, False))
    told = (tmp_path / "error").read_text()
    assert ("environment is too large" in told) is not starts
    assert start(launcher, tmp_path, recorded("array", s_stack=soft, h_stack=hard), shell)[0] == 0


@pytest.mark.parametrize("key", ["h_vmem", "s_vmem", "h_data", "s_data"])
@pytest.mark.parametrize(
    ("value", "size", "starts"),
    [("10M", MIB // 2, False), ("1", MIB // 4, False), ("10M", MIB // 10, True), ("1G", MIB, True)],
)
def test_a_job_whose_environment_has_no_room_in_its_memory_is_in_error_and_its_queue_is_not(
    launcher: Path, tmp_path: Path, key: str, value: str, size: int, starts: bool
) -> None:
    """The fork of Open Cluster Scheduler's shepherd that becomes the epilog dies before it is."""
    (tmp_path / "environment").write_text(f"A={'x' * 1022}\n" * (size // 1025))

    code, said = start(launcher, tmp_path, recorded("array", True, **{key: value}))

    assert (code, STARTED in said) == ((0, True) if starts else (APPERROR, False))
    assert ("environment is too large" in (tmp_path / "error").read_text()) is not starts
    assert start(launcher, tmp_path, recorded("array", False, **{key: value}))[0] == 0
