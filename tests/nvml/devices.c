/* SPDX-License-Identifier: Apache-2.0
 *
 * How a client comes by a handle, of a card or of a MIG device, and what these are.
 *
 * Keys speak of slots: gpu3 is the fourth slot even when gpu1 is `gone` and the driver's index of
 * what sits in it is 2. gpuN.migM is the MIG device of index M on gpuN; it is there when it has a
 * `uuid`. Its keys `gi` and `ci` say which instances it is.
 */
#include "double.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct nvmlDevice_st handles[MAX_GPUS][MAX_MIGS + 1]; /* the last of a row: the GPU itself */

nvmlDevice_t handle_of(int gpu, int mig)
{
    struct nvmlDevice_st *handle = &handles[gpu][mig == NONE ? MAX_MIGS : mig];
    handle->gpu = gpu;
    handle->mig = mig;
    return handle;
}

bool is_handle(nvmlDevice_t device)
{
    if (device < handles[0] || (void *)device >= (void *)(handles + MAX_GPUS))
        return false;
    if (device->mig == NONE)
        return device == &handles[device->gpu][MAX_MIGS];
    return text_of(device, "uuid") != NULL; /* a MIG device taken apart: its handle is invalid */
}

bool is_gone(nvmlDevice_t device)
{
    return number_or(text_at(device->gpu, NONE, "gone"), 0) != 0;
}

bool in_mig_mode(nvmlDevice_t device)
{
    return device->mig != NONE || number_or(text_at(device->gpu, NONE, "mig.mode"), 0) == 1;
}

int mig_by_instance(int gpu, unsigned int gpu_instance)
{
    for (int mig = 0; mig < MAX_MIGS; mig++)
        if (text_at(gpu, mig, "uuid") && number_or(text_at(gpu, mig, "gi"), 0) == gpu_instance)
            return mig;
    return NONE;
}

/* Returns how many cards there are below a slot. */
static unsigned int count_below(int slot)
{
    unsigned int count = 0;
    for (int gpu = 0; gpu < slot; gpu++)
        count += !is_gone(handle_of(gpu, NONE));
    return count;
}

static int slots(void)
{
    return (int)number_or(text_at(NONE, NONE, "devices"), 0);
}

SYSTEM_CALL(nvmlDeviceGetCount_v2, (unsigned int *count),
            (*count = count_below(slots()), NVML_SUCCESS))

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    nvmlReturn_t status = begin_system(__func__);
    int gpu = 0;
    while (gpu < slots() && (is_gone(handle_of(gpu, NONE)) || count_below(gpu) != index))
        gpu++;
    FAIL_IF(gpu >= slots(), NVML_ERROR_INVALID_ARGUMENT);
    TRY(told_to_fail(__func__, handle_of(gpu, NONE)));
    if (status == NVML_SUCCESS)
        *device = handle_of(gpu, NONE);
    return end(status);
}

DEVICE_CALL(nvmlDeviceGetIndex, (nvmlDevice_t device, unsigned int *index),
            (*index = device->mig == NONE ? count_below(device->gpu) : (unsigned int)device->mig,
             NVML_SUCCESS))

DEVICE_CALL(nvmlDeviceGetMigMode,
            (nvmlDevice_t device, unsigned int *mode, unsigned int *pending),
            number(device, "mig.mode", mode) ?: number(device, "mig.mode.pending", pending))

DEVICE_CALL(nvmlDeviceGetMaxMigDeviceCount, (nvmlDevice_t device, unsigned int *count),
            in_mig_mode(device) ? number(device, "mig.max", count) : (*count = 0, NVML_SUCCESS))

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index,
                                                 nvmlDevice_t *mig)
{
    nvmlReturn_t status = begin(__func__, device);
    FAIL_IF(device->mig != NONE, NVML_ERROR_INVALID_ARGUMENT);
    FAIL_IF(!text_of(device, "mig.mode"), NVML_ERROR_NOT_SUPPORTED);
    FAIL_IF(index >= number_or(text_of(device, "mig.max"), 0), NVML_ERROR_INVALID_ARGUMENT);
    FAIL_IF(!in_mig_mode(device) || !text_at(device->gpu, (int)index, "uuid"),
            NVML_ERROR_NOT_FOUND);
    if (status == NVML_SUCCESS)
        *mig = handle_of(device->gpu, (int)index);
    return end(status);
}

/* The bus id as the kernel writes it, 0000:3b:00.0, as NVML has it. */
static nvmlReturn_t read_place(const char *text, nvmlPciInfo_t *pci)
{
    memset(pci, 0, sizeof *pci);
    if (!text)
        return NVML_ERROR_NOT_SUPPORTED;
    if (sscanf(text, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device) != 3)
        return NVML_ERROR_UNKNOWN;
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", pci->domain, pci->bus & 0xff,
             pci->device & 0x1f);
    memcpy(pci->busIdLegacy, pci->busId + 4, 12);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    nvmlReturn_t status = begin(__func__, device);
    TRY(read_place(text_of(device, "pci.bus_id"), pci));
    if (status == NVML_SUCCESS)
        pci->pciDeviceId = (unsigned int)number_or(text_of(device, "pci.device_id"), 0);
    return end(status);
}

/* A list like 0-19,40-59 as a set of bits; Slurm's plugin asks for it. */
nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int words, unsigned long *set)
{
    nvmlReturn_t status = begin(__func__, device);
    const char *text = status == NVML_SUCCESS ? text_of(device, "cpus") : NULL;
    FAIL_IF(!text, NVML_ERROR_NOT_SUPPORTED);
    memset(set, 0, words * sizeof *set);
    for (char *rest; text && *text; text = *rest ? rest + 1 : rest) {
        unsigned long first = strtoul(text, &rest, 10);
        unsigned long last = *rest == '-' ? strtoul(rest + 1, &rest, 10) : first;
        for (; first <= last && first / 64 < words; first++)
            set[first / 64] |= 1UL << first % 64;
    }
    return end(status);
}

/* NVLink: nvlink.N.KEY is a key of link N. In MIG mode the links are off. */
static nvmlReturn_t check_link(nvmlDevice_t device, unsigned int link)
{
    const char *count = text_of(device, "nvlink.count");
    if (in_mig_mode(device) || !count)
        return NVML_ERROR_NOT_SUPPORTED;
    return link < number_or(count, 0) ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

static nvmlReturn_t link_number(nvmlDevice_t device, unsigned int link, const char *key,
                                unsigned int *value)
{
    unsigned long long wide = 0;
    nvmlReturn_t status = check_link(device, link);
    TRY(integer(text_of(device, "nvlink.%u.%s", link, key), &wide));
    *value = (unsigned int)wide;
    return status;
}

DEVICE_CALL(nvmlDeviceGetNvLinkState,
            (nvmlDevice_t device, unsigned int link, nvmlEnableState_t *active),
            link_number(device, link, "state", active))

DEVICE_CALL(nvmlDeviceGetNvLinkRemoteDeviceType,
            (nvmlDevice_t device, unsigned int link, nvmlIntNvLinkDeviceType_t *type),
            link_number(device, link, "remote.type", type))

DEVICE_CALL(nvmlDeviceGetNvLinkRemotePciInfo_v2,
            (nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci),
            check_link(device, link) ?: read_place(text_of(device, "nvlink.%u.remote.bus_id", link),
                                                   pci))
