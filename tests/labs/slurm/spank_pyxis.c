/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for pyxis: task_init takes the task into a root of its own, as the user, and sets what
 * the image's /etc/environment says. The root has the host's programs, and nothing of gpulock's.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(pyxis, 1)

static char image[4096], mounts[8192];

static int take(int value, const char *word, int remote)
{
	(void)remote;
	snprintf(value ? mounts : image, value ? sizeof mounts : sizeof image, "%s", word);
	return 0;
}

struct spank_option spank_options[] = {
	{ "container-image", "PATH", "the folder that becomes the task's root", 1, 0, take },
	{ "container-mounts", "SRC:DST", "what is bound onto a place of it", 1, 1, take },
	SPANK_OPTIONS_TABLE_END,
};

static int put(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY), good = fd >= 0 && write(fd, text, strlen(text)) >= 0;

	close(fd);
	return good ? 0 : -1;
}

static int bind_at(const char *from, const char *to)
{
	char place[8192];

	snprintf(place, sizeof place, "%s%s", image, to);
	return mount(from, place, NULL, MS_BIND | MS_REC, NULL);
}

static int set_image_environment(spank_t spank)
{
	char place[8192], line[4096], *value;
	FILE *file;

	snprintf(place, sizeof place, "%s/etc/environment", image);
	if (!(file = fopen(place, "r")))
		return -1;
	while (fgets(line, sizeof line, file)) {
		line[strcspn(line, "\n")] = 0;
		if ((value = strchr(line, '='))) {
			*value = 0;
			spank_setenv(spank, line, value + 1, 1);
		}
	}
	fclose(file);
	return 0;
}

int slurm_spank_task_init(spank_t spank, int count, char **words)
{
	static const char *const host[] = { "/usr", "/bin", "/lib", "/lib64", "/dev", "/proc" };
	char users[64], groups[64], *to;

	(void)count;
	(void)words;
	if (!*image)
		return 0;
	snprintf(users, sizeof users, "%u %u 1", getuid(), getuid());
	snprintf(groups, sizeof groups, "%u %u 1", getgid(), getgid());
	prctl(PR_SET_DUMPABLE, 1); /* else /proc/self is root's, as of a process that changed its user */
	if (set_image_environment(spank) || unshare(CLONE_NEWUSER | CLONE_NEWNS) ||
	    put("/proc/self/setgroups", "deny") || put("/proc/self/uid_map", users) ||
	    put("/proc/self/gid_map", groups))
		return -1;
	for (size_t number = 0; number < sizeof host / sizeof *host; number++)
		if (bind_at(host[number], host[number]))
			return -1;
	if ((to = strchr(mounts, ':'))) {
		*to++ = 0;
		if (bind_at(mounts, to))
			return -1;
	}
	return chroot(image) || chdir("/") ? -1 : 0;
}
