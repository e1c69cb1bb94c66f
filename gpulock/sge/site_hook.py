# SPDX-License-Identifier: Apache-2.0
"""The site's own prolog or epilog behind gpulock's: its user, its environment, the job's limits.

Hot, loaded where the queue's line has such a hook. `[USER@]COMMAND ARGUMENT...` runs as that user,
else as the job's owner, in the environment that the shepherd read from its file. One of root's
gets a PATH of root's, and of that file what execd writes over the owner's (docs/facts/
grid-engine.md, environment of hooks). `drop-env` hears in GPULOCK_ANSWERS that we have the site's
epilog in hand, and how that ended. Where gpulock's hook ended before, it runs that epilog itself.
"""

import os
import pwd
from _signal import SIG_DFL, SIGPIPE, SIGXFSZ, signal  # the C module: its Python face costs 4 ms

from gpulock.errors import INVALID_REQUEST, UNKNOWN, Refusal
from gpulock.hooks.frame import log_hook_line, unexpected_refusal
from gpulock.node.procfs import Proc
from gpulock.sge import hook, spool
from gpulock.sge.environment_file import ENVIRONMENT, ENVIRONMENT_LIMIT
from gpulock.sge.spool import Spool
from gpulock.store import atomic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

EXECD_NAMES = frozenset(
    {
        *("JOB_ID", "JOB_NAME", "JOB_SCRIPT", "REQUEST", "REQNAME", "USER", "LOGNAME", "HOSTNAME"),
        *("QUEUE", "ARC", "NQUEUES", "NSLOTS", "NHOSTS", "RESTARTED", "SGE_ROOT", "SGE_CELL"),
        *("SGE_ARCH", "SGE_ACCOUNT", "SGE_BINARY_PATH", "SGE_JOB_SPOOL_DIR", "SGE_TASK_ID"),
        *("SGE_TASK_FIRST", "SGE_TASK_LAST", "SGE_TASK_STEPSIZE"),
    }
)
PARALLEL_NAMES = frozenset(("PE", "PE_HOSTFILE"))  # execd's in a parallel environment
MASK_NAMES = frozenset(("CUDA_VISIBLE_DEVICES", "GPULOCK_DEVICES", "SGE_GPU"))  # ours in a grant
ROOT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PRLIMIT = "/usr/bin/prlimit"
NOT_STARTED = 127
SIGNALLED = 128


class SiteHook:
    """A hook of the site's: whose it is, its command, and all that it is started with.

    Raises Refusal where the job's files cannot be read or are forged.
    """

    def __init__(self, call: hook.SgeHookCall, environ: "Mapping[str, str]") -> None:
        owner, command, *arguments = call.site
        user, at, program = command.partition("@")
        try:
            self.user = pwd.getpwnam(user if at else owner)
        except KeyError as fault:
            why = f"the site's hook is of user {user if at else owner}, who is not known here"
            raise Refusal(UNKNOWN, why, "see getent passwd") from fault
        self.command = [program if at else command, *arguments]
        self.limits = environ.get("GPULOCK_LIMITS", "").split()
        job_spool = spool.open_shepherd_spool(Proc(), call.shepherd, os.geteuid())
        try:
            text = atomic.read_text(ENVIRONMENT, ENVIRONMENT_LIMIT, job_spool.fd)
        except OSError as fault:
            raise spool.unread_spool_refusal("the job's environment", fault) from fault
        kept = {name: value for name, value in environ.items() if name.startswith("SGE_")}
        kept.pop("SGE_TASK_ID", "")  # the others are the shepherd's, which drop-env has kept
        if self.user.pw_uid == 0:
            self.variables = {**kept, **root_variables(job_spool, text), "PATH": ROOT_PATH}
        else:
            self.variables = {**kept, **job_variables(job_spool, text)}

    def become(self) -> "NoReturn":
        """Become the hook under the job's own limits; raise OSError or ValueError.

        prlimit(1) sets them: under them nothing is sure to be left for an execve of ours.
        """
        for number in (SIGPIPE, SIGXFSZ):
            signal(number, SIG_DFL)  # both drop-env and Python ignore them
        if os.geteuid() == 0:
            os.initgroups(self.user.pw_name, self.user.pw_gid)
            os.setgid(self.user.pw_gid)
            os.setuid(self.user.pw_uid)
        words = [PRLIMIT, *self.limits, "--", *self.command]
        os.execve(PRLIMIT, words, self.variables)


def job_variables(job_spool: Spool, text: str) -> "dict[str, str]":
    """Return the job's environment as the shepherd reads it from its file.

    8.1.9 and Some Grid Engine (daimh/sge) have `enable_windomacc`, and escape backslashes too.
    """
    escaped = "enable_windomacc" in job_spool.config
    variables: "dict[str, str]" = {}
    for line in text.split("\n"):
        if not line.partition("=")[0] or "=" not in line:
            continue
        parts = line.split("\\\\") if escaped else [line]
        name, _, value = "\\".join([part.replace("\\n", "\n") for part in parts]).partition("=")
        variables[name] = value
    return variables


def root_variables(job_spool: Spool, text: str) -> "dict[str, str]":
    """Return what a hook of root's gets of it; raise Refusal for a name that stands there twice.

    execd writes a newline in a variable's name as it is: nobody can tell which line is execd's.
    """
    names = EXECD_NAMES
    if job_spool.config.get("pe", ["none"]) != ["none"]:
        names |= PARALLEL_NAMES
    if os.access(spool.RECORD, os.F_OK, dir_fd=job_spool.fd):
        names |= MASK_NAMES
    lines = [line for line in text.split("\n") if "=" in line and line.partition("=")[0] in names]
    variables = job_variables(job_spool, "\n".join(lines))
    if len(variables) != len(lines):
        raise Refusal(
            INVALID_REQUEST,
            "its environment names one of execd's variables twice",
            "submit without newlines in names of variables",
        )
    return variables


def become_site_prolog(call: hook.SgeHookCall, environ: "Mapping[str, str]") -> Refusal:
    """Become the site's prolog; return why that cannot be."""
    try:
        site = SiteHook(call, environ)
        answer_drop_env(environ, hook.DONE)
        site.become()
    except Refusal as refusal:
        return refusal
    except Exception as fault:  # whatever it is, the job does not start
        return unexpected_refusal(fault)


def run_site_epilog(call: hook.SgeHookCall, environ: "Mapping[str, str]") -> int:
    """Run the site's epilog to its end; return its exit code, and DONE where it cannot be run.

    Anything else would run a finished job again (docs/facts/grid-engine.md, exit codes of hooks).
    That of a forged job does not run, because no prolog of root's ran.
    """
    answer_drop_env(environ, hook.DONE)
    try:
        site = SiteHook(call, environ)
        pid = os.fork()
        if pid == 0:
            try:
                site.become()
            finally:
                os._exit(NOT_STARTED)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        code = SIGNALLED - code if code < 0 else code
    except Exception as fault:  # whatever it is, the GPUs are released
        refusal = fault if isinstance(fault, Refusal) else unexpected_refusal(fault)
        line = refusal.sentence(f"the site's epilog of {call.who}")
        log_hook_line(None, line, error=True, to_syslog=not call.tried)
        code = hook.DONE
    answer_drop_env(environ, code)
    return code


def answer_drop_env(environ: "Mapping[str, str]", code: int) -> None:
    """Write a byte to the `drop-env` above, where one waits for it."""
    if "GPULOCK_ANSWERS" in environ:
        try:
            fd = int(environ["GPULOCK_ANSWERS"])
            os.set_inheritable(fd, False)
            os.write(fd, bytes([code]))
        except (OSError, ValueError):  # it was killed: the locks matter more
            return
