/* SPDX-License-Identifier: Apache-2.0
 *
 * Whole calls that only hand out a key of the control file. A key that is not there, or is empty,
 * is what the card does not support.
 */
#include "double.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

nvmlReturn_t copy_text(const char *text, char *buffer, unsigned int length)
{
    if (!buffer)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!text)
        return NVML_ERROR_NOT_SUPPORTED;
    if (*text == '!')
        return (nvmlReturn_t)strtoul(text + 1, NULL, 10);
    if (strlen(text) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return NVML_SUCCESS;
}

nvmlReturn_t copy_number(nvmlDevice_t device, const char *key, unsigned int *value)
{
    unsigned long long wide;
    if (!value)
        return NVML_ERROR_INVALID_ARGUMENT;
    nvmlReturn_t status = integer(text_of(device, key), &wide);
    if (status == NVML_SUCCESS)
        *value = (unsigned int)wide;
    return status;
}

nvmlReturn_t answer_text(const char *function, nvmlDevice_t device, const char *key, char *buffer,
                         unsigned int length)
{
    nvmlReturn_t status = begin(function, device);
    if (status == NVML_SUCCESS)
        status = copy_text(text_of(device, key), buffer, length);
    return end(status);
}

nvmlReturn_t answer_number(const char *function, nvmlDevice_t device, const char *key,
                           unsigned int *value)
{
    nvmlReturn_t status = begin(function, device);
    if (status == NVML_SUCCESS)
        status = copy_number(device, key, value);
    return end(status);
}

nvmlReturn_t answer_long(const char *function, nvmlDevice_t device, const char *key,
                         unsigned long long *value)
{
    nvmlReturn_t status = begin(function, device);
    if (status == NVML_SUCCESS)
        status = value ? integer(text_of(device, key), value) : NVML_ERROR_INVALID_ARGUMENT;
    return end(status);
}

/* The key is `prefix` and the name of one of an enumeration's values. */
nvmlReturn_t answer_choice(const char *function, nvmlDevice_t device, const char *prefix,
                           const char *const *names, unsigned int count, unsigned int which,
                           unsigned int *value)
{
    char key[64];
    nvmlReturn_t status = begin(function, device);
    FAIL_IF(which >= count, NVML_ERROR_INVALID_ARGUMENT);
    if (status == NVML_SUCCESS) {
        snprintf(key, sizeof key, "%s%s", prefix, names[which]);
        status = copy_number(device, key, value);
    }
    return end(status);
}
