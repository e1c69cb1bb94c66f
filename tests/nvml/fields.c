/* SPDX-License-Identifier: Apache-2.0
 *
 * Field values: one call for many numbers. Each field reads the key that the call of its own reads
 * where there is one, and field.ID (or field.ID.SCOPE) where there is none.
 */
#include "double.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum scope { PLAIN, LINK, RAIL }; /* LINK: scopeId is an NVLink; RAIL: a scope of power */

struct field {
    unsigned int id;
    nvmlValueType_t type;
    enum scope scope;
    const char *key;
};

#define UINT NVML_VALUE_TYPE_UNSIGNED_INT
#define WIDE NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
#define SIGNED NVML_VALUE_TYPE_SIGNED_INT

static const struct field fields[] = {
    {1, UINT, PLAIN, "ecc.mode"},
    {2, UINT, PLAIN, "ecc.mode.pending"},
    {3, WIDE, PLAIN, "ecc.volatile.corrected"},
    {4, WIDE, PLAIN, "ecc.volatile.uncorrected"},
    {5, WIDE, PLAIN, "ecc.aggregate.corrected"},
    {6, WIDE, PLAIN, "ecc.aggregate.uncorrected"},
    {7, WIDE, PLAIN, "ecc.volatile.corrected.l1"},
    {8, WIDE, PLAIN, "ecc.volatile.uncorrected.l1"},
    {9, WIDE, PLAIN, "ecc.volatile.corrected.l2"},
    {10, WIDE, PLAIN, "ecc.volatile.uncorrected.l2"},
    {11, WIDE, PLAIN, "ecc.volatile.corrected.dram"},
    {12, WIDE, PLAIN, "ecc.volatile.uncorrected.dram"},
    {13, WIDE, PLAIN, "ecc.volatile.corrected.register"},
    {14, WIDE, PLAIN, "ecc.volatile.uncorrected.register"},
    {15, WIDE, PLAIN, "ecc.volatile.corrected.texture"},
    {16, WIDE, PLAIN, "ecc.volatile.uncorrected.texture"},
    {17, WIDE, PLAIN, "ecc.volatile.uncorrected.cbu"},
    {18, WIDE, PLAIN, "ecc.aggregate.corrected.l1"},
    {19, WIDE, PLAIN, "ecc.aggregate.uncorrected.l1"},
    {20, WIDE, PLAIN, "ecc.aggregate.corrected.l2"},
    {21, WIDE, PLAIN, "ecc.aggregate.uncorrected.l2"},
    {22, WIDE, PLAIN, "ecc.aggregate.corrected.dram"},
    {23, WIDE, PLAIN, "ecc.aggregate.uncorrected.dram"},
    {24, WIDE, PLAIN, "ecc.aggregate.corrected.register"},
    {25, WIDE, PLAIN, "ecc.aggregate.uncorrected.register"},
    {26, WIDE, PLAIN, "ecc.aggregate.corrected.texture"},
    {27, WIDE, PLAIN, "ecc.aggregate.uncorrected.texture"},
    {28, WIDE, PLAIN, "ecc.aggregate.uncorrected.cbu"},
    {29, UINT, PLAIN, "retired.sbe.count"},
    {30, UINT, PLAIN, "retired.dbe.count"},
    {31, UINT, PLAIN, "retired.pending"},
    {38, WIDE, PLAIN, "nvlink.errors.crc_flit"},
    {45, WIDE, PLAIN, "nvlink.errors.crc_data"},
    {52, WIDE, PLAIN, "nvlink.errors.replay"},
    {59, WIDE, PLAIN, "nvlink.errors.recovery"},
    {74, WIDE, PLAIN, "violation.power"},
    {75, WIDE, PLAIN, "violation.thermal"},
    {76, WIDE, PLAIN, "violation.sync_boost"},
    {77, WIDE, PLAIN, "violation.board_limit"},
    {78, WIDE, PLAIN, "violation.low_utilization"},
    {79, WIDE, PLAIN, "violation.reliability"},
    {80, WIDE, PLAIN, "violation.application_clocks"},
    {81, WIDE, PLAIN, "violation.base_clocks"},
    {82, UINT, PLAIN, "temperature.memory"},
    {83, WIDE, PLAIN, "energy"},
    {91, UINT, PLAIN, "nvlink.count"},
    {94, UINT, PLAIN, "pcie.replays"},
    {95, UINT, PLAIN, "pcie.replays.rollover"},
    {138, WIDE, LINK, "tx_kib"},
    {139, WIDE, LINK, "rx_kib"},
    {140, WIDE, LINK, "tx_raw_kib"},
    {141, WIDE, LINK, "rx_raw_kib"},
    {142, UINT, PLAIN, "remapped.correctable"},
    {143, UINT, PLAIN, "remapped.uncorrectable"},
    {144, UINT, PLAIN, "remapped.pending"},
    {145, UINT, PLAIN, "remapped.failure"},
    {147, UINT, PLAIN, "nvlink.switch_count"},
    {161, WIDE, LINK, "error.replay"},
    {162, WIDE, LINK, "error.recovery"},
    {163, WIDE, LINK, "error.crc"},
    {164, UINT, LINK, "speed"},
    {165, UINT, LINK, "state"},
    {166, UINT, LINK, "version"},
    {185, UINT, RAIL, "power.average"},
    {186, UINT, RAIL, "power.instant"},
    {187, UINT, RAIL, "power.limit.min"},
    {188, UINT, RAIL, "power.limit.max"},
    {189, UINT, RAIL, "power.limit.default"},
    {190, UINT, RAIL, "power.limit.enforced"},
    {191, WIDE, RAIL, "energy"},
    {192, UINT, RAIL, "power.limit"},
    {193, SIGNED, PLAIN, "temperature.limit.shutdown"},
    {194, SIGNED, PLAIN, "temperature.limit.slowdown"},
    {195, SIGNED, PLAIN, "temperature.limit.memory_max"},
    {196, SIGNED, PLAIN, "temperature.limit.gpu_max"},
    {197, WIDE, PLAIN, "pcie.tx_bytes"},
    {198, WIDE, PLAIN, "pcie.rx_bytes"},
    {202, WIDE, LINK, "tx_bytes"},
    {204, WIDE, LINK, "rx_bytes"},
    {230, UINT, PLAIN, "recovery_action"},
    {269, WIDE, PLAIN, "violation.sw_thermal"},
    {270, WIDE, PLAIN, "violation.hw_thermal"},
    {271, WIDE, PLAIN, "violation.hw_power_brake"},
    {301, UINT, PLAIN, "remapped.correctable.inactive"},
    {302, UINT, PLAIN, "remapped.uncorrectable.inactive"},
};

static const char *field_text(nvmlDevice_t device, const struct field *field,
                              const nvmlFieldValue_t *value)
{
    static const char *const rails[] = {"", ".module", ".memory"};
    const char *text = NULL;
    if (field && field->scope == RAIL)
        text = value->scopeId < 3
                   ? text_format(device, "%s%s", field->key, rails[value->scopeId])
                   : NULL;
    else if (field && field->scope == LINK)
        text = link_text(device, value->scopeId, field->key);
    else if (field)
        text = text_of(device, field->key);
    if (!text)
        text = text_format(device, "field.%u.%u", value->fieldId, value->scopeId);
    return text ? text : text_format(device, "field.%u", value->fieldId);
}

static bool known_to_be_lost_in_mig(unsigned int id)
{
    return id == 142 || id == 143 || id == 144 || id == 145 || (id >= 138 && id <= 141);
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
