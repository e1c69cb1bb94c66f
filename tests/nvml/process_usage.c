/* SPDX-License-Identifier: Apache-2.0
 *
 * How busy each process keeps a card. A process that did nothing has no sample; where none has
 * any, the answer is that nothing was found. In MIG mode nobody can say.
 */
#include "double.h"

#include <stdlib.h>
#include <string.h>

struct process {
    unsigned int pid, sm, memory, encoder, decoder;
    unsigned long long time;
};

/* process_utilization=PID:SM:MEMORY:ENCODER:DECODER[:TIME],... ; without TIME: of now. */
static const char *next_process(const char *text, struct process *process)
{
    char *rest = (char *)text;
    unsigned int *parts[] = {&process->pid, &process->sm, &process->memory, &process->encoder,
                             &process->decoder};
    for (size_t n = 0; n < sizeof parts / sizeof *parts; n++) {
        *parts[n] = (unsigned int)strtoul(rest, &rest, 10);
        if (*rest == ':')
            rest++;
    }
    process->time = strtoull(rest, &rest, 10);
    if (!process->time)
        process->time = (unsigned long long)(now_us() / 166667 * 166667);
    return *rest == ',' ? rest + 1 : NULL;
}

static nvmlReturn_t begin_processes(const char *function, nvmlDevice_t device, const char **text)
{
    nvmlReturn_t status = begin_busy(function, device);
    *text = status == NVML_SUCCESS ? text_of(device, "process_utilization") : NULL;
    FAIL_IF(!*text, NVML_ERROR_NOT_SUPPORTED);
    if (status == NVML_SUCCESS && strcmp(*text, "none") == 0) /* supported, and all are idle */
        status = NVML_ERROR_NOT_FOUND;
    return status;
}

static nvmlReturn_t verdict(unsigned int found, unsigned int room)
{
    if (found > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    return found ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device,
                                             nvmlProcessUtilizationSample_t *samples,
                                             unsigned int *count, unsigned long long since)
{
    const char *text;
    struct process process;
    nvmlReturn_t status = begin_processes(__func__, device, &text);
    unsigned int room = status == NVML_SUCCESS && samples ? *count : 0, found = 0;
    while (status == NVML_SUCCESS && text) {
        text = next_process(text, &process);
        if (samples && process.time <= since)
            continue;
        if (found++ < room)
            samples[found - 1] = (nvmlProcessUtilizationSample_t){
                process.pid, process.time, process.sm, process.memory, process.encoder,
                process.decoder};
    }
    if (status == NVML_SUCCESS)
        *count = found;
    return end(status == NVML_SUCCESS ? verdict(found, room) : status);
}
