/* SPDX-License-Identifier: Apache-2.0
 *
 * Initialisation, versions, and what else is asked of the machine, not of a card.
 */
#include "double.h"

static nvmlReturn_t enter(const char *function)
{
    nvmlReturn_t status = begin_without_init(function);
    return end(status == NVML_SUCCESS ? enter_library() : status);
}

CALL(nvmlInitWithFlags, (unsigned int flags), ((void)flags, enter(__func__)))
CALL(nvmlInit_v2, (void), enter(__func__))

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
