/* SPDX-License-Identifier: Apache-2.0
 *
 * What the NVML double itself costs: the calls of the exporter's look, once a second, and nothing
 * done with the answers. tests/bench/exporter.py holds their counts against the exporter's own.
 *
 * Usage: nvml_look [METRICS FIELDS RARE_FIELDS [LOOKS]]. The lists are GPM metrics, field values of
 * each look, and those of every fifth; a field value is NUMBER:SCOPE. Without lists it only wakes
 * up. With LOOKS it makes so many, without a pause, and ends.
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "nvml_api.h"

enum { CARDS = 8, MOST = 64, SAMPLES = 128, RARE = 5, PROCESSES = 10 };

nvmlReturn_t nvmlInit_v2(void);
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *);
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int, nvmlDevice_t *);
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t, char *, unsigned int);
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t, unsigned int *, unsigned int *);
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t, nvmlUtilization_t *);
nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t, nvmlSamplingType_t, unsigned long long,
                                  nvmlValueType_t *, unsigned int *, nvmlSample_t *);
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t, nvmlMemory_v2_t *);
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t, int, nvmlFieldValue_t *);
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t, nvmlTemperatureSensors_t, unsigned int *);
nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t, nvmlClockType_t, unsigned int *);
nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t, unsigned long long *);
nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t, nvmlEnableState_t *);
nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t, unsigned int *);
nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t, unsigned int *);
nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t, unsigned int *);
nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t, unsigned int *);
nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t, unsigned int *);
nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t, unsigned int *);
nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t, unsigned int *);
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t, nvmlGpuFabricInfoV_t *);
nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t, nvmlMemoryErrorType_t,
                                             nvmlEccCounterType_t, nvmlMemoryLocation_t,
                                             unsigned long long *);
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t, unsigned int *,
                                                     nvmlProcessInfo_t *);
nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t, unsigned int *,
                                                      nvmlProcessInfo_t *);
nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t, unsigned int *,
                                                        nvmlProcessInfo_t *);
nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *);
nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t, nvmlEventData_t *, unsigned int);
nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t, unsigned long long, nvmlEventSet_t);
nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *);
nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t, nvmlGpmSample_t);
nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *);

struct list {
    unsigned int count, numbers[MOST], scopes[MOST];
};

typedef nvmlReturn_t (*number_call)(nvmlDevice_t, unsigned int *);
static const number_call board[] = {
    nvmlDeviceGetPowerManagementLimit,   nvmlDeviceGetEnforcedPowerLimit,
    nvmlDeviceGetFanSpeed,               nvmlDeviceGetCurrPcieLinkGeneration,
    nvmlDeviceGetMaxPcieLinkGeneration,  nvmlDeviceGetCurrPcieLinkWidth,
    nvmlDeviceGetMaxPcieLinkWidth,
};
enum { BOARD = sizeof board / sizeof *board };

static nvmlDevice_t cards[CARDS];
static nvmlGpmSample_t windows[CARDS][2];
static unsigned long long seen[CARDS];
static nvmlEventSet_t events;
static nvmlGpmMetricsGet_t asked;
static struct list fields, rare;
static int has[BOARD];

static struct list numbers(char *text)
{
    struct list found = {0, {0}, {0}};
    for (char *rest; *text; text = *rest ? rest + 1 : rest) {
        if (found.count == MOST)
            exit(2);
        found.numbers[found.count] = (unsigned int)strtoul(text, &rest, 10);
        if (*rest == ':')
            found.scopes[found.count] = (unsigned int)strtoul(rest + 1, &rest, 10);
        found.count++;
    }
    return found;
}

static void read_fields(nvmlDevice_t card, const struct list *wanted, nvmlFieldValue_t *values)
{
    for (unsigned int n = 0; n < wanted->count; n++) {
        values[n].fieldId = wanted->numbers[n];
        values[n].scopeId = wanted->scopes[n];
    }
    nvmlDeviceGetFieldValues(card, (int)wanted->count, values);
}

/* The exporter does not ask again, for a while, for what a card has not. */
static void keep_known(nvmlDevice_t card, struct list *wanted)
{
    nvmlFieldValue_t values[MOST] = {{0}};
    unsigned int kept = 0;
    read_fields(card, wanted, values);
    for (unsigned int n = 0; n < wanted->count; n++)
        if (values[n].nvmlReturn == NVML_SUCCESS) {
            wanted->numbers[kept] = wanted->numbers[n];
            wanted->scopes[kept++] = wanted->scopes[n];
        }
    wanted->count = kept;
}

static void read_samples(int card)
{
    nvmlSample_t samples[SAMPLES];
    nvmlValueType_t type;
    unsigned int count = SAMPLES;
    nvmlDeviceGetSamples(cards[card], 1, seen[card], &type, &count, samples);
    if (count && count <= SAMPLES)
        seen[card] = samples[count - 1].timeStamp;
}

static void measure(int card, unsigned long long look)
{
    asked.sample1 = windows[card][look & 1];
    asked.sample2 = windows[card][~look & 1];
    nvmlGpmSampleGet(cards[card], asked.sample2);
    nvmlGpmMetricsGet(&asked);
}

static void read_rarely(nvmlDevice_t card)
{
    nvmlFieldValue_t values[MOST] = {{0}};
    unsigned long long errors;
    unsigned int number;
    nvmlEnableState_t mode;
    nvmlGpuFabricInfoV_t fabric = {.version = nvmlGpuFabricInfo_v2};
    read_fields(card, &rare, values);
    nvmlDeviceGetPersistenceMode(card, &mode);
    nvmlDeviceGetMemoryErrorCounter(card, 0, 0, 7, &errors);
    nvmlDeviceGetMemoryErrorCounter(card, 1, 0, 7, &errors);
    for (int n = 0; n < BOARD; n++)
        if (has[n])
            board[n](card, &number);
    nvmlDeviceGetGpuFabricInfoV(card, &fabric);
}

static void list_processes(nvmlDevice_t card)
{
    unsigned int none[3] = {0};
    nvmlDeviceGetComputeRunningProcesses_v3(card, &none[0], NULL);
    nvmlDeviceGetGraphicsRunningProcesses_v3(card, &none[1], NULL);
    nvmlDeviceGetMPSComputeRunningProcesses_v3(card, &none[2], NULL);
}

static void look(unsigned long long number)
{
    unsigned int one, other;
    unsigned long long bits;
    char uuid[96];
    nvmlUtilization_t rates;
    nvmlMemory_v2_t memory = {.version = nvmlMemory_v2};
    nvmlEventData_t event;
    nvmlFieldValue_t values[MOST] = {{0}};

    nvmlDeviceGetCount_v2(&one);
    for (int n = 0; n < CARDS; n++)
        nvmlDeviceGetUUID(cards[n], uuid, sizeof uuid);
    for (int n = 0; n < CARDS; n++)
        nvmlDeviceGetMigMode(cards[n], &one, &other);
    for (int n = 0; n < CARDS; n++) {
        nvmlDeviceGetUtilizationRates(cards[n], &rates);
        read_samples(n);
    }
    for (int n = 0; n < CARDS; n++)
        nvmlDeviceGetMemoryInfo_v2(cards[n], &memory);
    for (int n = 0; n < CARDS; n++)
        read_fields(cards[n], &fields, values);
    for (int n = 0; n < CARDS; n++)
        nvmlDeviceGetTemperature(cards[n], 0, &one);
    for (int n = 0; n < CARDS; n++) {
        nvmlDeviceGetClockInfo(cards[n], 1, &one);
        nvmlDeviceGetClockInfo(cards[n], 2, &one);
        nvmlDeviceGetCurrentClocksEventReasons(cards[n], &bits);
    }
    for (int n = 0; n < CARDS; n++)
        measure(n, number);
    for (int n = 0; n < CARDS; n++) {
        if ((number + (unsigned long long)n) % RARE == 0)
            read_rarely(cards[n]);
        if (number % PROCESSES == 0)
            list_processes(cards[n]);
    }
    nvmlEventSetWait_v2(events, &event, 0);
}

static void begin(char **argv)
{
    struct list metrics = numbers(argv[1]);
    fields = numbers(argv[2]);
    rare = numbers(argv[3]);
    asked.version = NVML_GPM_METRICS_GET_VERSION;
    asked.numMetrics = metrics.count;
    for (unsigned int n = 0; n < metrics.count; n++)
        asked.metrics[n].metricId = metrics.numbers[n];
    if (nvmlInit_v2() || nvmlEventSetCreate(&events))
        exit(1);
    for (unsigned int n = 0; n < CARDS; n++) {
        if (nvmlDeviceGetHandleByIndex_v2(n, &cards[n]) ||
            nvmlDeviceRegisterEvents(cards[n], 8, events) || nvmlGpmSampleAlloc(&windows[n][0]) ||
            nvmlGpmSampleAlloc(&windows[n][1]) || nvmlGpmSampleGet(cards[n], windows[n][0]))
            exit(1);
        read_samples((int)n);
    }
    keep_known(cards[0], &fields);
    keep_known(cards[0], &rare);
    for (int n = 0; n < BOARD; n++) {
        unsigned int number;
        has[n] = board[n](cards[0], &number) == NVML_SUCCESS;
    }
}

int main(int argc, char **argv)
{
    struct timespec due;
    if (argc >= 4)
        begin(argv);
    if (argc == 5) {
        unsigned long long looks = strtoull(argv[4], NULL, 10);
        for (unsigned long long number = 1; number <= looks; number++)
            look(number);
        return 0;
    }
    clock_gettime(CLOCK_MONOTONIC, &due);
    puts("ready");
    fflush(stdout);
    for (unsigned long long number = 1;; number++) {
        due.tv_sec++;
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL))
            ;
        if (argc == 4)
            look(number);
    }
}
