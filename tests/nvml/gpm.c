/* SPDX-License-Identifier: Apache-2.0
 *
 * GPM, from Hopper on: two samples, and what lay between. gpm=1 says that a card has it;
 * gpm.ID=NUMBER is a metric.
 */
#include "double.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct nvmlGpmSample_st {
    int gpu, mig;
    long long taken; /* 0: not yet */
};

static bool has_gpm(nvmlDevice_t device)
{
    return number_or(text_at(device->gpu, NONE, "gpm"), 0) == 1;
}

DEVICE_CALL(nvmlGpmQueryDeviceSupport, (nvmlDevice_t device, nvmlGpmSupport_t *support),
            support->version == NVML_GPM_SUPPORT_VERSION
                ? (support->isSupportedDevice = has_gpm(device), NVML_SUCCESS)
                : NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
SYSTEM_CALL(nvmlGpmSampleAlloc, (nvmlGpmSample_t *sample),
            (*sample = calloc(1, sizeof **sample)) ? NVML_SUCCESS : NVML_ERROR_MEMORY)
SYSTEM_CALL(nvmlGpmSampleFree, (nvmlGpmSample_t sample), (free(sample), NVML_SUCCESS))

static nvmlReturn_t take_sample(nvmlDevice_t device, int mig, nvmlGpmSample_t sample)
{
    if (!has_gpm(device))
        return NVML_ERROR_NOT_SUPPORTED;
    sample->gpu = device->gpu;
    sample->mig = mig;
    sample->taken = now_us();
    return NVML_SUCCESS;
}

DEVICE_CALL(nvmlGpmSampleGet, (nvmlDevice_t device, nvmlGpmSample_t sample),
            take_sample(device, device->mig, sample))

nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned int gpu_instance,
                                 nvmlGpmSample_t sample)
{
    nvmlReturn_t status = begin(__func__, device);
    int mig = status == NVML_SUCCESS ? mig_by_instance(device->gpu, gpu_instance) : NONE;
    FAIL_IF(mig == NONE || !in_mig_mode(device), NVML_ERROR_INVALID_ARGUMENT);
    TRY(take_sample(device, mig, sample));
    return end(status);
}

static void calculate(nvmlDevice_t device, nvmlGpmMetric_t *metric)
{
    unsigned long long now;
    const char *text = text_of(device, "gpm.%u", metric->metricId);
    metric->value = nan("");
    metric->nvmlReturn = integer(text, &now);
    if (metric->nvmlReturn == NVML_SUCCESS)
        metric->value = real_at(text, now_us());
    memset(&metric->metricInfo, 0, sizeof metric->metricInfo);
}

nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get)
{
    nvmlReturn_t status = begin_system(__func__);
    FAIL_IF(get->version != NVML_GPM_METRICS_GET_VERSION, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    nvmlGpmSample_t first = get->sample1, second = get->sample2;
    FAIL_IF(!first->taken || second->taken <= first->taken || first->gpu != second->gpu ||
                first->mig != second->mig || get->numMetrics > NVML_GPM_METRIC_MAX,
            NVML_ERROR_INVALID_ARGUMENT);
    if (status == NVML_SUCCESS) {
        nvmlDevice_t device = handle_of(first->gpu, first->mig);
        for (unsigned int n = 0; n < get->numMetrics; n++)
            calculate(device, &get->metrics[n]);
    }
    return end(status);
}
