/* SPDX-License-Identifier: Apache-2.0
 *
 * The processes on a card.
 *
 *     processes=PID:TYPE:BYTES[:GI:CI],...      TYPE: C compute, G graphics, M compute by MPS
 *
 * processes.growth=N starts N more after each answer that there is too little room: a list that
 * grows between the call that asks for its size and the one that asks for it.
 */
#include "double.h"

#include <stdlib.h>
#include <unistd.h>

enum { FIRST_PHANTOM = 4194304 }; /* no process has a number from here on: PID_MAX_LIMIT */

struct process {
    unsigned int pid, gi, ci;
    char type;
    unsigned long long memory;
};

struct list { /* one of three shapes to fill; all NULL: only the size is asked for */
    nvmlProcessInfo_v1_t *first;
    nvmlProcessInfo_v2_t *second;
    nvmlProcessInfo_t *third; /* of the last one with `processes.wide` */
    unsigned int room, found;
};

static unsigned int grown[MAX_GPUS];

static const char *next_process(const char *text, struct process *process)
{
    char *rest = (char *)text;
    process->pid = (unsigned int)strtoul(rest, &rest, 10);
    process->type = 'C';
    process->memory = 0;
    process->gi = process->ci = ~0U;
    if (rest[0] == ':' && rest[1]) {
        process->type = rest[1];
        rest += 2;
    }
    if (*rest == ':')
        process->memory = amount(rest + 1, &rest);
    if (*rest == ':')
        process->gi = (unsigned int)strtoul(rest + 1, &rest, 10);
    if (*rest == ':')
        process->ci = (unsigned int)strtoul(rest + 1, &rest, 10);
    return *rest == ',' ? rest + 1 : NULL;
}

static void add(struct list *list, const struct process *process)
{
    unsigned int n = list->found++;
    if (n >= list->room)
        return;
    if (list->first)
        list->first[n] = (nvmlProcessInfo_v1_t){process->pid, process->memory};
    if (list->second)
        list->second[n] = (nvmlProcessInfo_v2_t){process->pid, process->memory, process->gi,
                                                 process->ci};
    if (list->third && !number_or(text_at(NONE, NONE, "processes.wide"), 0))
        list->third[n] = (nvmlProcessInfo_t){process->pid, process->memory, process->gi,
                                             process->ci};
    else if (list->third) /* what nvml.h of CUDA 12.2.0 called nvmlProcessInfo_t */
        ((nvmlProcessDetail_v1_t *)list->third)[n] =
            (nvmlProcessDetail_v1_t){process->pid, process->memory, process->gi, process->ci, 0};
}

/* A MIG device shows its own; a GPU in MIG mode shows all of them, to root only. */
static nvmlReturn_t collect(nvmlDevice_t device, char type, struct list *list)
{
    const char *text = text_at(device->gpu, NONE, "processes");
    unsigned int gi = (unsigned int)number_or(text_of(device, "gi"), 0);
    unsigned int ci = (unsigned int)number_or(text_of(device, "ci"), 0);
    if (!text)
        return NVML_ERROR_NOT_SUPPORTED;
    if (*text == '!')
        return (nvmlReturn_t)strtoul(text + 1, NULL, 10);
    if (device->mig == NONE && in_mig_mode(device) && geteuid() != 0)
        return NVML_ERROR_NO_PERMISSION;
    for (struct process process; text && *text != 'n';) { /* `none` */
        text = next_process(text, &process);
        bool own = device->mig == NONE || (process.gi == gi && process.ci == ci);
        if (own && process.type == type)
            add(list, &process);
    }
    unsigned int growth =
        (unsigned int)number_or(text_at(device->gpu, NONE, "processes.growth"), 0);
    if (!growth)
        grown[device->gpu] = 0;
    for (unsigned int n = 0; n < grown[device->gpu] && type == 'C'; n++)
        add(list, &(struct process){FIRST_PHANTOM + n, ~0U, ~0U, 'C', 0});
    if (list->found <= list->room)
        return NVML_SUCCESS;
    grown[device->gpu] += growth;
    return NVML_ERROR_INSUFFICIENT_SIZE;
}

static nvmlReturn_t answer(const char *function, nvmlDevice_t device, char type,
                           unsigned int *count, struct list list)
{
    nvmlReturn_t status = begin(function, device);
    bool empty = !list.first && !list.second && !list.third;
    FAIL_IF(!count || (empty && *count), NVML_ERROR_INVALID_ARGUMENT);
    if (status == NVML_SUCCESS) {
        list.room = *count;
        status = collect(device, type, &list);
    }
    if (status == NVML_SUCCESS || status == NVML_ERROR_INSUFFICIENT_SIZE)
        *count = list.found;
    return end(status);
}

#define LIST_CALL(call, info, member, type)                                         \
    nvmlReturn_t call(nvmlDevice_t device, unsigned int *count, info *processes)    \
    {                                                                               \
        return answer(__func__, device, type, count, (struct list){.member = processes}); \
    }

LIST_CALL(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t, first, 'C')
LIST_CALL(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, second, 'C')
LIST_CALL(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t, third, 'C')
LIST_CALL(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t, first, 'G')
LIST_CALL(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t, second, 'G')
LIST_CALL(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t, third, 'G')
LIST_CALL(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t, first, 'M')
LIST_CALL(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t, second, 'M')
LIST_CALL(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t, third, 'M')
