/* SPDX-License-Identifier: Apache-2.0
 *
 * How often each function was called, by all processes together: records of 64 bytes (56 of a
 * name, 8 of a count, in this machine's byte order) in the file <control>.calls, mapped and shared.
 * The record PROCESSOR counts nanoseconds: what the double itself takes of its clients' time.
 */
#include "double.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { RECORDS = 1024, NAME = 56 };

struct record {
    char name[NAME];
    unsigned long long count;
};

static struct record *records;
static int file = -1;
static char mapped[4096]; /* the control file they belong to: tests in one process change it */

static bool map_records(void)
{
    char path[sizeof mapped + 8];
    size_t size = RECORDS * sizeof *records;
    const char *control = control_path();
    if (!control || strcmp(control, mapped) == 0)
        return records != NULL;
    if (records) {
        munmap(records, size);
        close(file);
        records = NULL;
    }
    snprintf(mapped, sizeof mapped, "%s", control);
    snprintf(path, sizeof path, "%s.calls", mapped);
    file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0 || ftruncate(file, (off_t)size) != 0)
        return false;
    void *place = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    records = place == MAP_FAILED ? NULL : place;
    return records != NULL;
}

/* The record of a name, or of none yet; NULL where all are taken. */
static struct record *look_for(const char *name)
{
    for (int n = 0; n < RECORDS; n++)
        if (!records[n].name[0] || strncmp(records[n].name, name, NAME - 1) == 0)
            return &records[n];
    return NULL;
}

static const char PROCESSOR[] = "processor";
static __thread unsigned long long begun; /* by this thread's own clock; 0: not within a call */

static unsigned long long thread_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (unsigned long long)now.tv_sec * 1000000000 + (unsigned long long)now.tv_nsec;
}

static void add(const char *name, unsigned long long amount)
{
    struct record *record = map_records() ? look_for(name) : NULL;
    if (record && !record->name[0]) { /* two processes may want to be the first */
        flock(file, LOCK_EX);
        record = look_for(name);
        if (record && !record->name[0])
            snprintf(record->name, NAME, "%s", name);
        flock(file, LOCK_UN);
    }
    if (record)
        __atomic_fetch_add(&record->count, amount, __ATOMIC_RELAXED);
}

void count_call(const char *function)
{
    begun = thread_ns();
    add(function, 1);
}

void count_processor(void)
{
    if (begun)
        add(PROCESSOR, thread_ns() - begun);
    begun = 0;
}
