/* SPDX-License-Identifier: Apache-2.0
 *
 * How often each function was called, by all processes together: records of 64 bytes (56 of a
 * name, 8 of a count, in this machine's byte order) in the file <control>.calls, mapped and shared.
 * The record PROCESSOR counts nanoseconds: what the double itself takes of its clients' time.
 */
#include "double.h"

#include <fcntl.h>
#include <stdint.h>
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

static struct { /* __func__ of one function is one address: no need to compare names each time */
    const char *function;
    struct record *record;
} known[2 * RECORDS];

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
        memset(known, 0, sizeof known);
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

/* The record of a name; two processes may want to be the first, so the file is locked. */
static struct record *find_record(const char *function)
{
    struct record *found = NULL;
    flock(file, LOCK_EX);
    for (int n = 0; n < RECORDS && !found; n++) {
        if (!records[n].name[0])
            snprintf(records[n].name, NAME, "%s", function);
        if (strncmp(records[n].name, function, NAME - 1) == 0)
            found = &records[n];
    }
    flock(file, LOCK_UN);
    return found;
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
    if (!map_records())
        return;
    size_t place = ((uintptr_t)name >> 3) % (2 * RECORDS);
    while (known[place].function && known[place].function != name)
        place = (place + 1) % (2 * RECORDS);
    if (!known[place].function) {
        known[place].record = find_record(name);
        known[place].function = name;
    }
    if (known[place].record)
        __atomic_fetch_add(&known[place].record->count, amount, __ATOMIC_RELAXED);
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
