/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls that do not come back until the control file changes:
 *
 *     deaf     only SIGKILL is heard
 *     undead   as deaf, and after SIGKILL nobody can reap the process, as with a driver that
 *              never returns: a helper traces it, and the kernel keeps a traced process for its
 *              tracer. It is let go when the control file changes, and after a minute at latest.
 */
#define _GNU_SOURCE
#include "double.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LOOK_US = 5000, UNDEAD_US = 60 * 1000000 };

static bool same_file(const char *path, const struct stat *before)
{
    struct stat now;
    return stat(path, &now) == 0 && same_state(&now, before);
}

static void wait_for_change(const char *path, const struct stat *before, long limit_us)
{
    for (long waited = 0; same_file(path, before); waited += LOOK_US) {
        if (limit_us && waited > limit_us)
            return;
        usleep(LOOK_US);
    }
}

/* Runs in the helper: trace the process, say so, then hold on to it. */
static void hold_on(pid_t process, int channel, const char *path, const struct stat *before)
{
    char go;
    bool traced = false;
    if (read(channel, &go, 1) == 1) /* an earlier helper may be about to let go */
        for (int n = 0; n < 40 && !traced; n++) {
            traced = ptrace(PTRACE_SEIZE, process, NULL, NULL) == 0;
            if (!traced)
                usleep(LOOK_US);
        }
    if (write(channel, traced ? "y" : "n", 1) != 1 || !traced)
        _exit(1);
    for (int fd = 0; fd < 1024; fd++)
        close(fd); /* the other ends of its pipes must see it go */
    wait_for_change(path, before, UNDEAD_US);
    _exit(0);
}

/* The helper is nobody's child. */
static void get_traced(const char *path, const struct stat *before)
{
    int channel[2];
    char answer = 'n';
    pid_t process = getpid(); /* its first thread: the one that becomes the zombie */
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, channel) != 0)
        return;
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    pid_t child = fork();
    if (child == 0) {
        if (fork() == 0) {
            setsid();
            close(channel[0]);
            hold_on(process, channel[1], path, before);
        }
        _exit(0);
    }
    close(channel[1]);
    waitpid(child, NULL, 0);
    if (write(channel[0], "g", 1) != 1 || read(channel[0], &answer, 1) != 1 || answer != 'y')
        fprintf(stderr, "nvml double: cannot be traced: `undead` will be `deaf`\n");
    close(channel[0]);
}

/* `before`: the control file that told so. If it changed since, this comes back at once. */
void hang(const char *manner, const struct stat *before)
{
    const char *path = control_path();
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &old); /* a signal would also stop one that is traced */
    if (strcmp(manner, "undead") == 0 && same_file(path, before))
        get_traced(path, before);
    wait_for_change(path, before, 0);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}
