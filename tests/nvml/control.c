/* SPDX-License-Identifier: Apache-2.0
 *
 * The control file: lines KEY=VALUE, read again when it changed, the last line of a key counts.
 * A key is NAME, gpuN.NAME, gpu*.NAME or gpuN.migM.NAME; include=PATH reads another file there.
 */
#include "double.h"

#include <fnmatch.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_FILES = 8 };

struct line {
    int gpu, mig; /* NONE, ANY or a number */
    const char *key, *value;
};

static struct {
    char *texts[MAX_FILES];
    int files;
    struct line *lines;
    unsigned int count, space;
    struct rule *rules;
    unsigned int rule_count;
    bool read;
    struct stat seen;
} control;

/* Takes `gpu3.` or `gpu*.` off the key. */
static int take_number(char **key, const char *word)
{
    size_t length = strlen(word);
    if (strncmp(*key, word, length) != 0)
        return NONE;
    char *rest = *key + length;
    int number = ANY;
    if (*rest == '*')
        rest++;
    else {
        char *digits = rest;
        number = (int)strtol(digits, &rest, 10);
        if (rest == digits)
            return NONE;
    }
    if (*rest != '.')
        return NONE;
    *key = rest + 1;
    return number;
}

/* error.CALL, hang.CALL, crash.CALL; without .CALL every call is meant. */
static void add_rule(const struct line *line)
{
    static const char *const kinds[] = {"error", "hang", "crash"};
    for (size_t n = 0; n < sizeof kinds / sizeof *kinds; n++) {
        size_t length = strlen(kinds[n]);
        if (strncmp(line->key, kinds[n], length) != 0)
            continue;
        if (line->key[length] != '.' && line->key[length] != '\0')
            continue;
        const char *pattern = line->key[length] ? line->key + length + 1 : "*";
        struct rule rule = {kinds[n][0], line->gpu, line->mig, pattern, line->value};
        control.rules = realloc(control.rules, (control.rule_count + 1) * sizeof rule);
        control.rules[control.rule_count++] = rule;
    }
}

static void add_line(char *key, const char *value)
{
    if (control.count == control.space) {
        control.space = control.space ? 2 * control.space : 1024;
        control.lines = realloc(control.lines, control.space * sizeof *control.lines);
    }
    struct line *line = &control.lines[control.count++];
    line->gpu = take_number(&key, "gpu");
    line->mig = line->gpu == NONE ? NONE : take_number(&key, "mig");
    line->key = key;
    line->value = value;
    add_rule(line);
}

static char *read_whole(const char *path, struct stat *status)
{
    FILE *file = fopen(path, "re");
    if (!file)
        return NULL;
    char *text = NULL;
    if (fstat(fileno(file), status) == 0 && (text = malloc((size_t)status->st_size + 1)) != NULL)
        text[fread(text, 1, (size_t)status->st_size, file)] = '\0';
    fclose(file);
    return text;
}

static void read_file(const char *path, struct stat *status)
{
    char *text = control.files < MAX_FILES ? read_whole(path, status) : NULL;
    if (!text)
        return;
    control.texts[control.files++] = text;
    for (char *end; (end = strchr(text, '\n')) != NULL; text = end + 1) { /* whole lines only */
        *end = '\0';
        char *equals = strchr(text, '=');
        if (*text == '#' || !equals)
            continue;
        *equals = '\0';
        struct stat other;
        if (strcmp(text, "include") == 0)
            read_file(equals + 1, &other);
        else
            add_line(text, equals + 1);
    }
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
    if (!path || stat(path, &now) != 0)
        return control.read; /* a file taken away: its last state stays */
    if (control.read && same_state(&now, &control.seen))
        return true;
    for (int n = 0; n < control.files; n++)
        free(control.texts[n]);
    control.files = 0;
    control.count = control.rule_count = 0;
    read_file(path, &control.seen);
    control.read = true;
    return true;
}

static bool fits(int asked, int given)
{
    return asked == given || (given == ANY && asked != NONE);
}

const char *text_at(int gpu, int mig, const char *key)
{
    for (unsigned int n = control.count; n-- > 0;) { /* the last one counts */
        const struct line *line = &control.lines[n];
        if (fits(gpu, line->gpu) && fits(mig, line->mig) && strcmp(line->key, key) == 0)
            return *line->value ? line->value : NULL;
    }
    return NULL;
}

const char *text_of(nvmlDevice_t device, const char *key)
{
    return text_at(device->gpu, device->mig, key);
}

const char *text_format(nvmlDevice_t device, const char *format, ...)
{
    char key[128];
    va_list rest;
    va_start(rest, format);
    vsnprintf(key, sizeof key, format, rest);
    va_end(rest);
    return text_of(device, key);
}

/* A rule for a GPU holds for its MIG devices too; the last that fits counts; 0 or nothing lifts. */
const char *rule_for(char kind, const char *function, int gpu, int mig)
{
    for (unsigned int n = control.rule_count; n-- > 0;) {
        const struct rule *rule = &control.rules[n];
        bool here = (rule->gpu == NONE || fits(gpu, rule->gpu)) &&
                    (rule->mig == NONE || fits(mig, rule->mig));
        if (rule->kind == kind && here && fnmatch(rule->pattern, function, 0) == 0)
            return *rule->value && strcmp(rule->value, "0") != 0 ? rule->value : NULL;
    }
    return NULL;
}
