/* SPDX-License-Identifier: Apache-2.0
 *
 * Initialisation, versions, and what else is asked of the machine, not of a card.
 */
#include "double.h"

#include <stdio.h>

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    nvmlReturn_t status = begin_without_init(__func__);
    (void)flags;
    return end(status == NVML_SUCCESS ? enter_library() : status);
}

nvmlReturn_t nvmlInit_v2(void)
{
    nvmlReturn_t status = begin_without_init(__func__);
    return end(status == NVML_SUCCESS ? enter_library() : status);
}

nvmlReturn_t nvmlInit(void)
{
    nvmlReturn_t status = begin_without_init(__func__);
    return end(status == NVML_SUCCESS ? enter_library() : status);
}

nvmlReturn_t nvmlShutdown(void)
{
    nvmlReturn_t status = begin_without_init(__func__);
    return end(status == NVML_SUCCESS ? leave_library() : status);
}

static nvmlReturn_t answer_system_text(const char *function, const char *key, char *buffer,
                                       unsigned int length)
{
    nvmlReturn_t status = begin_system(function);
    if (status == NVML_SUCCESS)
        status = copy_text(text_at(NONE, NONE, key), buffer, length);
    return end(status);
}

CALL(nvmlSystemGetDriverVersion, (char *version, unsigned int length),
     answer_system_text(__func__, "driver.version", version, length))

CALL(nvmlSystemGetNVMLVersion, (char *version, unsigned int length),
     answer_system_text(__func__, "nvml.version", version, length))

static nvmlReturn_t cuda_version(const char *function, int *version)
{
    unsigned long long value;
    nvmlReturn_t status = begin_without_init(function); /* these two need no nvmlInit */
    if (status == NVML_SUCCESS)
        status = integer(text_at(NONE, NONE, "cuda.version"), &value);
    if (status == NVML_SUCCESS)
        *version = (int)value;
    return end(status);
}

CALL(nvmlSystemGetCudaDriverVersion, (int *version), cuda_version(__func__, version))
CALL(nvmlSystemGetCudaDriverVersion_v2, (int *version), cuda_version(__func__, version))

nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length)
{
    char path[64], line[4096] = "";
    nvmlReturn_t status = begin_system(__func__);
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = status == NVML_SUCCESS ? fopen(path, "re") : NULL;
    if (file) {
        line[fread(line, 1, sizeof line - 1, file)] = '\0';
        fclose(file);
    } else if (status == NVML_SUCCESS)
        status = NVML_ERROR_NOT_FOUND;
    return end(status == NVML_SUCCESS ? copy_text(line, name, length) : status);
}

nvmlReturn_t nvmlUnitGetCount(unsigned int *count)
{
    nvmlReturn_t status = begin_system(__func__);
    if (status == NVML_SUCCESS)
        *count = 0; /* S-class units: nobody has them any more */
    return end(status);
}
