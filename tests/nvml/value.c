/* SPDX-License-Identifier: Apache-2.0
 *
 * Numbers of the control file, which may change with time:
 *
 *     SEGMENT[,SEGMENT...]      SEGMENT: BASE[K|M|G][+RATE/s|-RATE/s][@TIME]
 *
 * The value is that of the last segment whose TIME (microseconds since 1970) has come: BASE plus
 * RATE for each second since TIME. `0,90@1700000000000000` is 0, then 90. `!15` is the error 15.
 */
#include "double.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct segment {
    const char *base;
    int unit; /* a power of two */
    double rate;
    long long from;
};

/* Takes a K, M or G. */
static int take_unit(char **rest)
{
    static const char units[] = "KMG";
    const char *unit = **rest ? strchr(units, **rest) : NULL;
    if (!unit)
        return 0;
    (*rest)++;
    return 10 * (int)(unit - units + 1);
}

static const char *parse(const char *text, struct segment *segment)
{
    char *rest;
    segment->base = text;
    segment->rate = 0;
    segment->from = 0;
    strtod(text, &rest);
    segment->unit = take_unit(&rest);
    if (*rest == '+' || *rest == '-') {
        segment->rate = strtod(rest, &rest);
        if (strncmp(rest, "/s", 2) == 0)
            rest += 2;
    }
    if (*rest == '@')
        segment->from = strtoll(rest + 1, &rest, 10);
    return *rest == ',' ? rest + 1 : NULL;
}

/* The segment that holds at `when`, and when the next begins. */
static struct segment segment_at(const char *text, long long when, long long *until)
{
    struct segment found, next;
    const char *rest = parse(text, &found);
    *until = 0;
    while (rest) {
        rest = parse(rest, &next);
        if (next.from > when) {
            *until = next.from;
            break;
        }
        found = next;
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
    long long now = now_us(), until;
    struct segment segment = segment_at(text, now, &until);
    *value = strtoull(segment.base, NULL, 0) << segment.unit; /* a minus sign wraps, as it would */
    if (segment.rate != 0)
        *value += (unsigned long long)llround(segment.rate * (double)(now - segment.from) / 1e6);
    return NVML_SUCCESS;
}

unsigned long long number_or(const char *text, unsigned long long otherwise)
{
    unsigned long long value;
    return integer(text, &value) == NVML_SUCCESS ? value : otherwise;
}

/* The mean over a stretch of time: what a driver that averages would say at its end. */
double mean_between(const char *text, long long from, long long to)
{
    double sum = 0;
    long long time = from, until;
    do {
        struct segment segment = segment_at(text, time, &until);
        long long stop = until && until < to ? until : to;
        double middle = (double)(time + stop) / 2 - (double)segment.from;
        double value = ldexp(strtod(segment.base, NULL), segment.unit);
        value += segment.rate * middle / 1e6;
        if (to <= from)
            return value;
        sum += value * (double)(stop - time);
        time = stop;
    } while (time < to);
    return sum / (double)(to - from);
}

/* An amount within a list: 512, 512K, 512M or 512G; `-` is what stands where nobody knows. */
unsigned long long amount(const char *text, char **rest)
{
    if (*text == '-') {
        *rest = (char *)text + 1;
        return ~0ULL;
    }
    unsigned long long value = strtoull(text, rest, 10);
    return value << take_unit(rest);
}
