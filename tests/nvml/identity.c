/* SPDX-License-Identifier: Apache-2.0
 *
 * What a card is and where it sits: names, numbers, modes, PCI, processors nearby.
 */
#include "double.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

TEXT_CALL(nvmlDeviceGetName, "name")
TEXT_CALL(nvmlDeviceGetUUID, "uuid")
NUMBER_CALL(nvmlDeviceGetMinorNumber, "minor")
NUMBER_CALL(nvmlDeviceGetNumaNodeId, "numa_node_id")
CALL(nvmlDeviceGetAddressingMode, (nvmlDevice_t device, nvmlDeviceAddressingMode_t *mode),
     answer_number(__func__, device, "addressing_mode", mode ? &mode->value : NULL))

NUMBER_CALL(nvmlDeviceGetPersistenceMode, "persistence")
NUMBER_CALL(nvmlDeviceGetMaxPcieLinkGeneration, "pcie.generation.max")
NUMBER_CALL(nvmlDeviceGetCurrPcieLinkGeneration, "pcie.generation")
NUMBER_CALL(nvmlDeviceGetMaxPcieLinkWidth, "pcie.width.max")
NUMBER_CALL(nvmlDeviceGetCurrPcieLinkWidth, "pcie.width")

struct place {
    unsigned int domain, bus, slot, id;
};

static nvmlReturn_t read_place(nvmlDevice_t device, struct place *place)
{
    const char *text = text_of(device, "pci.bus_id");
    if (!text)
        return NVML_ERROR_NOT_SUPPORTED;
    if (sscanf(text, "%x:%x:%x", &place->domain, &place->bus, &place->slot) != 3)
        return NVML_ERROR_UNKNOWN;
    place->id = (unsigned int)number_or(text_of(device, "pci.device_id"), 0);
    return NVML_SUCCESS;
}

static void print_bus(char *buffer, size_t size, const char *format, const struct place *place)
{
    char text[64];
    snprintf(text, sizeof text, format, place->domain, place->bus, place->slot);
    memset(buffer, 0, size);
    memcpy(buffer, text, strnlen(text, size - 1));
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    struct place place;
    nvmlReturn_t status = begin(__func__, device);
    FAIL_IF(!pci, NVML_ERROR_INVALID_ARGUMENT);
    if (status == NVML_SUCCESS)
        status = read_place(device, &place);
    if (status == NVML_SUCCESS) {
        pci->domain = place.domain;
        pci->bus = place.bus;
        pci->device = place.slot;
        pci->pciDeviceId = place.id;
        print_bus(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", &place);
        print_bus(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", &place);
    }
    return end(status);
}

/* A list like 0-19,40-59 as a set of bits; Slurm's plugin asks for it. */
nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int words, unsigned long *set)
{
    nvmlReturn_t status = begin(__func__, device);
    const char *text = status == NVML_SUCCESS ? text_of(device, "cpus") : NULL;
    FAIL_IF(!text, NVML_ERROR_NOT_SUPPORTED);
    FAIL_IF(!words || !set, NVML_ERROR_INVALID_ARGUMENT);
    if (status == NVML_SUCCESS) {
        memset(set, 0, words * sizeof *set);
        for (char *rest; *text; text = *rest ? rest + 1 : rest) {
            unsigned long first = strtoul(text, &rest, 10);
            unsigned long last = *rest == '-' ? strtoul(rest + 1, &rest, 10) : first;
            for (; first <= last && first / 64 < words; first++)
                set[first / 64] |= 1UL << first % 64;
        }
    }
    return end(status);
}
