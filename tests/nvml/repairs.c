/* SPDX-License-Identifier: Apache-2.0
 *
 * How a card mends its memory: rows remapped (from A100 on), pages retired (up to V100).
 */
#include "double.h"

#include <stdlib.h>
#include <string.h>

/* While MIG instances stand, the rows cannot be asked for. */
static nvmlReturn_t begin_rows(const char *function, nvmlDevice_t device)
{
    nvmlReturn_t status = begin(function, device);
    FAIL_IF(in_mig_mode(device) && text_at(device->gpu, 0, "uuid"), NVML_ERROR_NOT_SUPPORTED);
    return status;
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *correctable,
                                       unsigned int *uncorrectable, unsigned int *pending,
                                       unsigned int *failure)
{
    nvmlReturn_t status = begin_rows(__func__, device);
    if (status == NVML_SUCCESS)
        status = copy_number(device, "remapped.correctable", correctable);
    if (status == NVML_SUCCESS)
        status = copy_number(device, "remapped.uncorrectable", uncorrectable);
    if (status == NVML_SUCCESS)
        status = copy_number(device, "remapped.pending", pending);
    if (status == NVML_SUCCESS)
        status = copy_number(device, "remapped.failure", failure);
    return end(status);
}

static unsigned int number(nvmlDevice_t device, const char *key)
{
    return (unsigned int)number_or(text_of(device, key), 0);
}

nvmlReturn_t nvmlDeviceGetRemappedRows_v2(nvmlDevice_t device, nvmlRemappedRowsInfo_v2_t *info)
{
    nvmlReturn_t status = begin_rows(__func__, device);
    if (status == NVML_SUCCESS)
        status = copy_number(device, "remapped.correctable", &info->corrActiveRemaps);
    if (status == NVML_SUCCESS) {
        info->uncActiveRemaps = number(device, "remapped.uncorrectable");
        info->corrInactiveRemaps = number(device, "remapped.correctable.inactive");
        info->uncInactiveRemaps = number(device, "remapped.uncorrectable.inactive");
        info->bPending = number(device, "remapped.pending");
        info->bFailureOccurred = number(device, "remapped.failure");
    }
    return end(status);
}

nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device,
                                               nvmlRowRemapperHistogramValues_t *values)
{
    nvmlReturn_t status = begin_rows(__func__, device);
    if (status == NVML_SUCCESS)
        status = copy_number(device, "remapped.banks.max", &values->max);
    if (status == NVML_SUCCESS) {
        values->high = number(device, "remapped.banks.high");
        values->partial = number(device, "remapped.banks.partial");
        values->low = number(device, "remapped.banks.low");
        values->none = number(device, "remapped.banks.none");
    }
    return end(status);
}

/* retired.sbe=ADDRESS:TIME,...   retired.dbe=...   `none` is a list without pages. */
static nvmlReturn_t answer_pages(const char *function, nvmlDevice_t device,
                                 nvmlPageRetirementCause_t cause, unsigned int *count,
                                 unsigned long long *addresses, unsigned long long *times)
{
    nvmlReturn_t status = begin(function, device);
    const char *text = NULL;
    FAIL_IF(cause > 1 || !count, NVML_ERROR_INVALID_ARGUMENT);
    FAIL_IF(!(text = text_of(device, cause ? "retired.dbe" : "retired.sbe")),
            NVML_ERROR_NOT_SUPPORTED);
    if (status == NVML_SUCCESS) {
        unsigned int room = addresses ? *count : 0, found = 0;
        if (strcmp(text, "none") == 0)
            text = "";
        for (char *rest; *text; text = *rest ? rest + 1 : rest) {
            unsigned long long address = strtoull(text, &rest, 0);
            unsigned long long time = *rest == ':' ? strtoull(rest + 1, &rest, 10) : 0;
            if (found < room)
                addresses[found] = address;
            if (found < room && times)
                times[found] = time;
            found++;
        }
        *count = found;
        if (found > room)
            status = NVML_ERROR_INSUFFICIENT_SIZE;
    }
    return end(status);
}

CALL(nvmlDeviceGetRetiredPages,
     (nvmlDevice_t device, nvmlPageRetirementCause_t cause, unsigned int *count, unsigned long long *addresses),
     answer_pages(__func__, device, cause, count, addresses, NULL))

CALL(nvmlDeviceGetRetiredPages_v2,
     (nvmlDevice_t device, nvmlPageRetirementCause_t cause, unsigned int *count, unsigned long long *addresses, unsigned long long *times),
     answer_pages(__func__, device, cause, count, addresses, times))

NUMBER_CALL(nvmlDeviceGetRetiredPagesPendingStatus, "retired.pending")
