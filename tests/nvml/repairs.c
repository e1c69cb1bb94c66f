/* SPDX-License-Identifier: Apache-2.0
 *
 * How a card mends its memory: rows remapped, from A100 on.
 */
#include "double.h"

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

