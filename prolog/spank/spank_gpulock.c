/* SPDX-License-Identifier: Apache-2.0
 *
 * SPANK plugin: run gpulock's TaskProlog on the node, before pyxis takes the task into a container.
 *
 * plugstack.conf names it twice: above pyxis, where it runs the hook and does what that prints, and
 * below it with the word "again", where it does so once more: what an image sets must not stand
 * (docs/facts/containers.md, spank plugins). slurmstepd calls task_init in the process that becomes
 * the task, as the user. The plugin does nothing anywhere else. What fails ends that process alone,
 * and so the task, with the hook's own exit code: slurmctld knows it (RequeueExit).
 *
 * The Makefile here compiles it, and defines GPULOCK_HOOK and GPULOCK_BUILD.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(gpulock, 1)

const char gpulock_spank_build[] = "gpulock-spank-build " GPULOCK_BUILD;

enum { FAILED = 1, NO_HOOK = 127 };

/* All that the hook reads. The rest of the job's environment is the user's, and the loader obeys it
 * (LD_PRELOAD): a hook that is not itself would let a refused job run. Of a name that is there twice
 * the first is Slurm's. */
static const char *const given[] = {
	"SLURM_JOB_ID=",        "SLURM_STEP_ID=",       "SLURM_STEP_GPUS=", "SLURM_GPUS_ON_NODE=",
	"SLURMD_NODENAME=",     "SLURM_RESTART_COUNT=", "CUDA_VISIBLE_DEVICES=",
	"APPTAINER_BINDPATH=",  "SINGULARITY_BINDPATH=",
	"CUDA_MPS_PIPE_DIRECTORY=",               "CUDA_MPS_LOG_DIRECTORY=",
	"APPTAINERENV_CUDA_MPS_PIPE_DIRECTORY=",  "SINGULARITYENV_CUDA_MPS_PIPE_DIRECTORY=",
};
#define GIVEN (sizeof given / sizeof *given)

/* What the hook printed, for the second time. It may hold the user's two bind lists, of which the
 * kernel lets none be longer than 128 KiB. */
static char said[4 << 17];
static size_t length;
static int done;

static void __attribute__((noreturn)) stop(int code, const char *why)
{
	slurm_error("gpulock: %s: %s", GPULOCK_HOOK, why);
	_exit(code);
}

/* Do what one line says, as slurmstepd does of a TaskProlog. */
static void obey(spank_t spank, char *line, int again)
{
	char *value;

	if (!strncmp(line, "print ", 6)) {
		if (!again)
			dprintf(STDOUT_FILENO, "%s\n", line + 6);
	} else if (!strncmp(line, "unset ", 6)) {
		spank_unsetenv(spank, line + 6); /* it may not be there */
	} else if (!strncmp(line, "export ", 7) && (value = strchr(line, '='))) {
		*value = 0;
		if (spank_setenv(spank, line + 7, value + 1, 1) != ESPANK_SUCCESS)
			stop(FAILED, "a variable cannot be set");
		*value = '=';
	}
}

static void obey_all(spank_t spank, int again)
{
	char *line, *end;

	for (line = said; (end = strchr(line, '\n')); line = end + 1) {
		*end = 0;
		obey(spank, line, again);
		*end = '\n';
	}
}

static void __attribute__((noreturn)) become_hook(char *const *env, int out)
{
	char *const words[] = { (char *)GPULOCK_HOOK, NULL };
	int in = open("/dev/null", O_RDONLY | O_CLOEXEC);

	if (in >= 0 && dup2(in, STDIN_FILENO) >= 0 && dup2(out, STDOUT_FILENO) >= 0)
		execve(GPULOCK_HOOK, words, env);
	_exit(NO_HOOK);
}

static void run_hook(spank_t spank)
{
	struct sigaction normal = { .sa_handler = SIG_DFL }, before;
	char **all = NULL, *env[GIVEN + 1];
	size_t number, kept = 0;
	int ends[2], status = -1;
	ssize_t got;
	pid_t pid;

	if (spank_get_item(spank, S_JOB_ENV, &all) != ESPANK_SUCCESS || !all)
		stop(FAILED, "the task's environment cannot be had");
	for (number = 0; number < GIVEN; number++) {
		char **one = all;
		while (*one && strncmp(*one, given[number], strlen(given[number])))
			one++;
		if (*one)
			env[kept++] = *one;
	}
	env[kept] = NULL;
	sigaction(SIGCHLD, &normal, &before); /* where children are ignored no exit code is to be had */
	if (pipe2(ends, O_CLOEXEC) || (pid = fork()) < 0)
		stop(FAILED, strerror(errno));
	if (!pid)
		become_hook(env, ends[1]);
	close(ends[1]);
	while ((got = read(ends[0], said + length, sizeof said - 1 - length)) != 0) {
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0 || (length += got) == sizeof said - 1)
			stop(FAILED, "it prints too much");
	}
	close(ends[0]);
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			stop(FAILED, strerror(errno));
	sigaction(SIGCHLD, &before, NULL);
	if (memchr(said, 0, length))
		stop(FAILED, "it prints a zero");
	if (!WIFEXITED(status) || WEXITSTATUS(status)) {
		for (char *line = said, *end; (end = strchr(line, '\n')); line = end + 1) {
			*end = 0; /* why it refuses, to the task's own output */
			if (!strncmp(line, "print ", 6))
				obey(spank, line, 0);
		}
		stop(WIFEXITED(status) ? WEXITSTATUS(status) : FAILED, "the task does not start");
	}
	done = 1;
}

int slurm_spank_task_init(spank_t spank, int count, char **words)
{
	int again = count > 0 && !strcmp(words[0], "again");

	if (spank_context() != S_CTX_REMOTE)
		return 0;
	if (!again && !done)
		run_hook(spank);
	if (!done)
		stop(FAILED, "not named above this line of plugstack.conf");
	obey_all(spank, again);
	return 0;
}
