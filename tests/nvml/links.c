/* SPDX-License-Identifier: Apache-2.0
 *
 * NVLink, PCIe traffic, and how near two cards are.
 *
 * nvlink.N.KEY is a key of link N, nvlink.*.KEY of all of them; the counters of all links together
 * (scope ~0 of a field value) are nvlink.all.KEY, or else the sum of the links.
 */
#include "double.h"

#include <stdio.h>
#include <string.h>

const char *link_text(nvmlDevice_t device, unsigned int link, const char *key)
{
    static char sum[32];
    unsigned long long total = 0, one;
    bool any = false;
    if (link < NVML_NVLINK_MAX_LINKS) {
        const char *text = text_format(device, "nvlink.%u.%s", link, key);
        if (!text && link < number_or(text_of(device, "nvlink.count"), 0))
            text = text_format(device, "nvlink.*.%s", key);
        return text;
    }
    const char *text = text_format(device, "nvlink.all.%s", key);
    if (text || link != ~0U)
        return text;
    for (link = 0; link < NVML_NVLINK_MAX_LINKS; link++)
        if (integer(link_text(device, link, key), &one) == NVML_SUCCESS) {
            total += one;
            any = true;
        }
    snprintf(sum, sizeof sum, "%llu", total);
    return any ? sum : NULL;
}

/* In MIG mode the links are off. */
static nvmlReturn_t begin_link(const char *function, nvmlDevice_t device, unsigned int link)
{
    nvmlReturn_t status = begin(function, device);
    if (status == NVML_SUCCESS && in_mig_mode(device))
        return NVML_ERROR_NOT_SUPPORTED;
    if (status == NVML_SUCCESS && !text_of(device, "nvlink.count"))
        return NVML_ERROR_NOT_SUPPORTED;
    if (status == NVML_SUCCESS && link >= number_or(text_of(device, "nvlink.count"), 0))
        return NVML_ERROR_INVALID_ARGUMENT;
    return status;
}

static nvmlReturn_t answer_link(const char *function, nvmlDevice_t device, unsigned int link,
                                const char *key, unsigned int *value)
{
    unsigned long long wide = 0;
    nvmlReturn_t status = begin_link(function, device, link);
    FAIL_IF(!value, NVML_ERROR_INVALID_ARGUMENT);
    if (status == NVML_SUCCESS)
        status = integer(link_text(device, link, key), &wide);
    if (status == NVML_SUCCESS)
        *value = (unsigned int)wide;
    return end(status);
}

/* fabric.state and fabric.status; a card that has neither is in no fabric (state 0). */
nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *fabric)
{
    nvmlReturn_t status = begin(__func__, device);
    FAIL_IF(!fabric, NVML_ERROR_INVALID_ARGUMENT);
    if (status == NVML_SUCCESS) {
        fabric->state = (unsigned char)number_or(text_of(device, "fabric.state"), 0);
        fabric->status = (nvmlReturn_t)number_or(text_of(device, "fabric.status"), 0);
    }
    return end(status);
}

/* Version 3, with fabric.summary, where that is set; else version 2. */
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t *fabric)
{
    nvmlReturn_t status = begin(__func__, device);
    FAIL_IF(!fabric, NVML_ERROR_INVALID_ARGUMENT);
    const char *summary = status == NVML_SUCCESS ? text_of(device, "fabric.summary") : NULL;
    unsigned int known = summary ? nvmlGpuFabricInfo_v3 : nvmlGpuFabricInfo_v2;
    FAIL_IF(fabric->version != known, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    if (status == NVML_SUCCESS) {
        fabric->state = (unsigned char)number_or(text_of(device, "fabric.state"), 0);
        fabric->status = (nvmlReturn_t)number_or(text_of(device, "fabric.status"), 0);
        fabric->healthMask = (unsigned int)number_or(text_of(device, "fabric.mask"), 0);
        if (summary)
            fabric->healthSummary = (unsigned char)number_or(summary, 0);
    }
    return end(status);
}

CALL(nvmlDeviceGetNvLinkState, (nvmlDevice_t device, unsigned int link, nvmlEnableState_t *active),
     answer_link(__func__, device, link, "state", active))

CALL(nvmlDeviceGetNvLinkRemoteDeviceType,
     (nvmlDevice_t device, unsigned int link, nvmlIntNvLinkDeviceType_t *type),
     answer_link(__func__, device, link, "remote.type", type))

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link,
                                                 nvmlPciInfo_t *pci)
{
    nvmlReturn_t status = begin_link(__func__, device, link);
    const char *bus = status == NVML_SUCCESS ? link_text(device, link, "remote.bus_id") : NULL;
    FAIL_IF(!bus, NVML_ERROR_NOT_SUPPORTED);
    if (status == NVML_SUCCESS) {
        memset(pci, 0, sizeof *pci);
        if (sscanf(bus, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device) != 3)
            status = NVML_ERROR_UNKNOWN;
        snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", pci->domain, pci->bus & 0xff,
                 pci->device & 0x1f);
        memcpy(pci->busIdLegacy, pci->busId + 4, 12);
    }
    return end(status);
}
