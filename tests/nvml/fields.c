/* SPDX-License-Identifier: Apache-2.0
 *
 * Field values: one call for many numbers. Each field reads the key that the call of its own reads
 * where there is one.
 */
#include "double.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

struct field {
    unsigned int id;
    nvmlValueType_t type;
    bool of_link; /* its scope is an NVLink */
    const char *key;
};

#define UINT NVML_VALUE_TYPE_UNSIGNED_INT
#define WIDE NVML_VALUE_TYPE_UNSIGNED_LONG_LONG

static const struct field fields[] = {
    {7, WIDE, false, "ecc.volatile.corrected.l1"},
    {8, WIDE, false, "ecc.volatile.uncorrected.l1"},
    {9, WIDE, false, "ecc.volatile.corrected.l2"},
    {10, WIDE, false, "ecc.volatile.uncorrected.l2"},
    {11, WIDE, false, "ecc.volatile.corrected.dram"},
    {12, WIDE, false, "ecc.volatile.uncorrected.dram"},
    {13, WIDE, false, "ecc.volatile.corrected.register"},
    {14, WIDE, false, "ecc.volatile.uncorrected.register"},
    {15, WIDE, false, "ecc.volatile.corrected.texture"},
    {16, WIDE, false, "ecc.volatile.uncorrected.texture"},
    {17, WIDE, false, "ecc.volatile.uncorrected.cbu"},
    {38, WIDE, false, "nvlink.errors.crc_flit"},
    {45, WIDE, false, "nvlink.errors.crc_data"},
    {52, WIDE, false, "nvlink.errors.replay"},
    {59, WIDE, false, "nvlink.errors.recovery"},
    {74, WIDE, false, "violation.power"},
    {75, WIDE, false, "violation.thermal"},
    {76, WIDE, false, "violation.sync_boost"},
    {77, WIDE, false, "violation.board_limit"},
    {79, WIDE, false, "violation.reliability"},
    {82, UINT, false, "temperature.memory"},
    {83, WIDE, false, "energy"},
    {94, UINT, false, "pcie.replays"},
    {138, WIDE, true, "tx_kib"},
    {139, WIDE, true, "rx_kib"},
    {142, UINT, false, "remapped.correctable"},
    {143, UINT, false, "remapped.uncorrectable"},
    {144, UINT, false, "remapped.pending"},
    {145, UINT, false, "remapped.failure"},
    {165, UINT, true, "state"},
    {186, UINT, false, "power.instant"},
    {197, WIDE, false, "pcie.tx_bytes"},
    {198, WIDE, false, "pcie.rx_bytes"},
    {230, UINT, false, "recovery_action"},
    {251, WIDE, false, "violation.lower.sw_thermal"}, /* of 575.51 to 580.76 */
    {252, WIDE, false, "violation.lower.hw_thermal"},
    {253, WIDE, false, "violation.lower.hw_power_brake"},
    {269, WIDE, false, "violation.sw_thermal"},
    {270, WIDE, false, "violation.hw_thermal"},
    {271, WIDE, false, "violation.hw_power_brake"},
};

static const char *field_text(nvmlDevice_t device, const struct field *field,
                              const nvmlFieldValue_t *value)
{
    if (!field)
        return NULL;
    if (!field->of_link)
        return text_of(device, "%s", field->key);
    return value->scopeId == ~0U ? text_of(device, "nvlink.all.%s", field->key)
                                 : text_of(device, "nvlink.%u.%s", value->scopeId, field->key);
}

static bool known_to_be_lost_in_mig(unsigned int id)
{
    return id == 142 || id == 143 || id == 144 || id == 145 || id == 138 || id == 139;
}

static void read_field(nvmlDevice_t device, nvmlFieldValue_t *value)
{
    const struct field *field = NULL;
    for (size_t n = 0; n < sizeof fields / sizeof *fields && !field; n++)
        if (fields[n].id == value->fieldId)
            field = &fields[n];
    unsigned long long number = 0;
    const char *text = field_text(device, field, value);
    nvmlReturn_t status = integer(text, &number);
    if (in_mig_mode(device) && known_to_be_lost_in_mig(value->fieldId))
        status = NVML_ERROR_NOT_SUPPORTED;
    value->nvmlReturn = status;
    value->timestamp = now_us();
    value->latencyUsec = 0;
    memset(&value->value, 0, sizeof value->value);
    value->valueType = field ? field->type : WIDE;
    if (status != NVML_SUCCESS)
        return;
    if (value->valueType == WIDE)
        value->value.ullVal = number;
    else
        value->value.uiVal = (unsigned int)number;
}

/* error.nvmlDeviceGetFieldValues.ID sets one field's status: looked up as a call of that name. */
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    nvmlReturn_t status = begin(__func__, device);
    FAIL_IF(!values || count < 0, NVML_ERROR_INVALID_ARGUMENT);
    const char *filled = status == NVML_SUCCESS ? text_of(device, "fields.filled") : NULL;
    if (filled && strcmp(filled, "untouched") == 0)
        count = 0;
    for (int n = 0; status == NVML_SUCCESS && n < count; n++) {
        char name[64];
        if (filled && strcmp(filled, "zeros") == 0) {
            memset(&values[n].timestamp, 0,
                   sizeof values[n] - offsetof(nvmlFieldValue_t, timestamp));
            continue;
        }
        read_field(device, &values[n]);
        snprintf(name, sizeof name, "%s.%u", __func__, values[n].fieldId);
        nvmlReturn_t told = told_to_fail(name, device);
        if (told != NVML_SUCCESS)
            values[n].nvmlReturn = told;
    }
    return end(status);
}
