# SPDX-License-Identifier: Apache-2.0
"""What Slurm's daemons are made to believe, by a library that is loaded before the others.

`haste`: slurmctld looks for what is to be done ten times as often. Its main loop sleeps ten times
for a tenth of a second (22.05, `_slurmctld_background`), and starts no batch job but there: a test
would wait for that, and for nothing else, most of its time.

`unified`: this machine has cgroup version 2 alone. /proc/PID/cgroup names those of version 1 also
where none is mounted, and slurmd would not start (24.11, `cgroup/v2`, "hybrid mode").
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

_SOURCES: Final = {
    "haste": """
#include <time.h>
#include <unistd.h>

int usleep(useconds_t useconds)
{
    struct timespec rest = {0, 0};
    if (useconds == 100000)
        useconds = 10000;
    rest.tv_sec = useconds / 1000000;
    rest.tv_nsec = useconds % 1000000 * 1000L;
    return nanosleep(&rest, 0);
}
""",
    "unified": r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int is_cgroup(const char *path)
{
    size_t length = strlen(path);
    return length > 7 && !strncmp(path, "/proc/", 6) && !strcmp(path + length - 7, "/cgroup");
}

static int only_unified(const char *path)
{
    FILE *(*real)(const char *, const char *) = dlsym(RTLD_NEXT, "fopen64");
    FILE *file = real(path, "r");
    char line[4096];
    int seen;
    if (!file)
        return -1;
    seen = memfd_create("cgroup", MFD_CLOEXEC);
    while (fgets(line, sizeof line, file))
        if (!strncmp(line, "0::", 3))
            dprintf(seen, "%s", line);
    fclose(file);
    lseek(seen, 0, SEEK_SET);
    return seen;
}

static int open_as(const char *name, const char *path, int flags, int mode)
{
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, name);
    return is_cgroup(path) ? only_unified(path) : real(path, flags, mode);
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) \
    { \
        va_list more; \
        int mode; \
        va_start(more, flags); \
        mode = va_arg(more, int); \
        va_end(more); \
        return open_as(#name, path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

static FILE *fopen_as(const char *name, const char *path, const char *mode)
{
    FILE *(*real)(const char *, const char *) = dlsym(RTLD_NEXT, name);
    int seen;
    if (!is_cgroup(path))
        return real(path, mode);
    seen = only_unified(path);
    return seen < 0 ? 0 : fdopen(seen, "r");
}

FILE *fopen(const char *path, const char *mode) { return fopen_as("fopen", path, mode); }
FILE *fopen64(const char *path, const char *mode) { return fopen_as("fopen64", path, mode); }
""",
}


def preloaded(folder: Path, name: str) -> str:
    """Return the library by which a daemon believes it; it is made in `folder`, once."""
    made = folder / f"{name}.so"
    if not made.exists():
        source = folder / f"{name}.c"
        source.write_text(_SOURCES[name])
        build = ["gcc", "-shared", "-fPIC", "-o", str(made), str(source)]
        subprocess.run(build, check=True, timeout=60)
    return str(made)
