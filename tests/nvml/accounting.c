/* SPDX-License-Identifier: Apache-2.0
 *
 * Accounting mode: what the driver keeps of each process, also after its end. Not with MIG.
 *
 *     accounting=1  accounting.buffer=4000  accounting.pids=PID,...
 *     accounting.PID=GPU%:MEMORY%:BYTES:TIME_MS:START_US:RUNNING
 */
#include "double.h"

#include <stdlib.h>
#include <string.h>

static nvmlReturn_t begin_accounting(const char *function, nvmlDevice_t device)
{
    nvmlReturn_t status = begin(function, device);
    FAIL_IF(in_mig_mode(device), NVML_ERROR_NOT_SUPPORTED);
    return status;
}

nvmlReturn_t nvmlDeviceGetAccountingMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    nvmlReturn_t status = begin_accounting(__func__, device);
    return end(status == NVML_SUCCESS ? copy_number(device, "accounting", mode) : status);
}

nvmlReturn_t nvmlDeviceGetAccountingBufferSize(nvmlDevice_t device, unsigned int *size)
{
    nvmlReturn_t status = begin_accounting(__func__, device);
    return end(status == NVML_SUCCESS ? copy_number(device, "accounting.buffer", size) : status);
}

/* Switching it off forgets the processes; `accounting.pids` then has to be given anew. */
SET_CALL(nvmlDeviceSetAccountingMode, "accounting")

static bool is_on(nvmlDevice_t device)
{
    return number_or(text_of(device, "accounting"), 0) == 1;
}

nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned int *count,
                                         unsigned int *pids)
{
    nvmlReturn_t status = begin_accounting(__func__, device);
    const char *text = status == NVML_SUCCESS ? text_of(device, "accounting.pids") : NULL;
    FAIL_IF(!is_on(device), NVML_ERROR_NOT_SUPPORTED);
    FAIL_IF(!count, NVML_ERROR_INVALID_ARGUMENT);
    if (status == NVML_SUCCESS) {
        unsigned int room = pids ? *count : 0, found = 0;
        for (char *rest; text && *text; text = *rest ? rest + 1 : rest) {
            unsigned int pid = (unsigned int)strtoul(text, &rest, 10);
            if (found++ < room)
                pids[found - 1] = pid;
        }
        *count = found;
        if (found > room)
            status = NVML_ERROR_INSUFFICIENT_SIZE;
    }
    return end(status);
}

nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned int pid,
                                          nvmlAccountingStats_t *stats)
{
    nvmlReturn_t status = begin_accounting(__func__, device);
    const char *text = status == NVML_SUCCESS ? text_format(device, "accounting.%u", pid) : NULL;
    FAIL_IF(!is_on(device), NVML_ERROR_NOT_SUPPORTED);
    FAIL_IF(!stats, NVML_ERROR_INVALID_ARGUMENT);
    FAIL_IF(!text, NVML_ERROR_NOT_FOUND);
    if (status == NVML_SUCCESS) {
        unsigned long long values[6] = {0};
        char *rest = (char *)text;
        for (int n = 0; n < 6; n++) {
            values[n] = amount(rest, &rest);
            if (*rest == ':')
                rest++;
        }
        memset(stats, 0, sizeof *stats);
        stats->gpuUtilization = (unsigned int)values[0];
        stats->memoryUtilization = (unsigned int)values[1];
        stats->maxMemoryUsage = values[2];
        stats->time = values[3];
        stats->startTime = values[4];
        stats->isRunning = (unsigned int)values[5];
    }
    return end(status);
}
