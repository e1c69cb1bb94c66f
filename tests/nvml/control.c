/* SPDX-License-Identifier: Apache-2.0
 *
 * The control file: lines KEY=VALUE, read again when it changed. A key is NAME, gpuN.NAME or
 * gpuN.migM.NAME. And its numbers, which may change with time:
 *
 *     SEGMENT[,SEGMENT...]      SEGMENT: BASE[+RATE/s|-RATE/s][@TIME]
 *
 * The value is that of the last segment whose TIME (microseconds since 1970) has come: BASE plus
 * RATE for each second since TIME. `0,90@1700000000000000` is 0, then 90. `!15` is the error 15.
 */
#include "double.h"

#include <fnmatch.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct line {
    int gpu, mig;
    const char *key, *value;
};

static struct {
    char *text;
    struct line *lines;
    size_t count;
    struct stat seen;
} control;

/* Takes `gpu3.` off the key. */
static int take_number(char **key, const char *format)
{
    int number = NONE, length = 0;
    if (sscanf(*key, format, &number, &length) != 1 || !length)
        return NONE;
    *key += length;
    return number;
}

static void add_line(char *key, char *value)
{
    if (control.count % 1024 == 0)
        control.lines = realloc(control.lines, (control.count + 1024) * sizeof *control.lines);
    struct line *line = &control.lines[control.count++];
    line->gpu = take_number(&key, "gpu%d.%n");
    line->mig = take_number(&key, "mig%d.%n");
    line->key = key;
    line->value = value;
}

/* Without the variable it is what a machine's own link leads to: some programs keep none. */
const char *control_path(void)
{
    static char path[PATH_MAX];
    const char *named = getenv("NVML_DOUBLE");
    if (named)
        return named;
    if (!*path && !realpath("/etc/nvml-double", path))
        *path = '\0'; /* it says how far it came */
    return *path ? path : NULL;
}

struct stat control_seen(void)
{
    return control.seen;
}

bool same_state(const struct stat *one, const struct stat *other)
{
    return one->st_ino == other->st_ino && one->st_size == other->st_size &&
           one->st_ctim.tv_sec == other->st_ctim.tv_sec &&
           one->st_ctim.tv_nsec == other->st_ctim.tv_nsec;
}

bool control_refresh(void)
{
    const char *path = control_path();
    struct stat now;
    if (!path || stat(path, &now) != 0 || (control.text && same_state(&now, &control.seen)))
        return control.text != NULL; /* a file taken away: its last state stays */
    FILE *file = fopen(path, "re");
    if (!file || fstat(fileno(file), &control.seen) != 0)
        return control.text != NULL;
    size_t size = (size_t)control.seen.st_size;
    free(control.text);
    control.text = malloc(size + 1);
    control.text[fread(control.text, 1, size, file)] = '\0';
    control.count = 0;
    fclose(file);
    char *text = control.text;
    for (char *end; (end = strchr(text, '\n')) != NULL; text = end + 1) { /* whole lines only */
        char *equals = memchr(text, '=', (size_t)(end - text));
        *end = '\0';
        if (!equals)
            continue;
        *equals = '\0';
        add_line(text, equals + 1);
    }
    return true;
}

const char *text_at(int gpu, int mig, const char *key)
{
    for (size_t n = control.count; n-- > 0;) {
        const struct line *line = &control.lines[n];
        if (line->gpu == gpu && line->mig == mig && strcmp(line->key, key) == 0)
            return *line->value ? line->value : NULL;
    }
    return NULL;
}

const char *text_of(nvmlDevice_t device, const char *format, ...)
{
    char key[128];
    va_list rest;
    va_start(rest, format);
    vsnprintf(key, sizeof key, format, rest);
    va_end(rest);
    return text_at(device->gpu, device->mig, key);
}

/* A rule for a GPU holds for its MIG devices too; the last that fits counts; 0 or nothing lifts. */
const char *rule_for(const char *kind, const char *function, nvmlDevice_t device)
{
    int gpu = is_handle(device) ? device->gpu : NONE, mig = gpu == NONE ? NONE : device->mig;
    size_t length = strlen(kind);
    for (size_t n = control.count; n-- > 0;) {
        const struct line *line = &control.lines[n];
        bool here = (line->gpu == NONE || line->gpu == gpu) &&
                    (line->mig == NONE || line->mig == mig);
        if (here && strncmp(line->key, kind, length) == 0 && line->key[length] == '.' &&
            fnmatch(line->key + length + 1, function, 0) == 0)
            return *line->value && strcmp(line->value, "0") != 0 ? line->value : NULL;
    }
    return NULL;
}

struct segment {
    const char *base;
    double rate;
    long long from;
};

static const char *parse(const char *text, struct segment *segment)
{
    char *rest;
    *segment = (struct segment){.base = text};
    strtod(text, &rest);
    if (*rest == '+' || *rest == '-') {
        segment->rate = strtod(rest, &rest);
        rest += strncmp(rest, "/s", 2) == 0 ? 2 : 0;
    }
    if (*rest == '@')
        segment->from = strtoll(rest + 1, &rest, 10);
    return *rest == ',' ? rest + 1 : NULL;
}

/* The segment that holds at `when`. */
static struct segment segment_at(const char *text, long long when)
{
    struct segment found, next;
    for (const char *rest = parse(text, &found); rest; found = next) {
        rest = parse(rest, &next);
        if (next.from > when)
            break;
    }
    return found;
}

long long now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

nvmlReturn_t integer(const char *text, unsigned long long *value)
{
    if (!text)
        return NVML_ERROR_NOT_SUPPORTED;
    if (*text == '!')
        return (nvmlReturn_t)strtoul(text + 1, NULL, 10);
    long long now = now_us();
    struct segment segment = segment_at(text, now);
    *value = strtoull(segment.base, NULL, 0); /* a minus sign wraps, as it would */
    if (segment.rate != 0)
        *value += (unsigned long long)llround(segment.rate * (double)(now - segment.from) / 1e6);
    return NVML_SUCCESS;
}

unsigned long long number_or(const char *text, unsigned long long otherwise)
{
    unsigned long long value;
    return integer(text, &value) == NVML_SUCCESS ? value : otherwise;
}

double real_at(const char *text, long long when)
{
    struct segment segment = segment_at(text, when);
    return strtod(segment.base, NULL) + segment.rate * (double)(when - segment.from) / 1e6;
}
