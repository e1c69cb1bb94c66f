/* SPDX-License-Identifier: Apache-2.0
 *
 * How busy a card is: now, and in the driver's buffer of samples. In MIG mode nobody can say.
 *
 * The buffer is made of the same keys as the values of now: a sample at each whole `period`, the
 * mean over the period that ended there, the youngest `count` of them. samples.gpu=TIME:VALUE ...
 * puts others in their place.
 */
#include "double.h"

#include <math.h>
#include <stdlib.h>

nvmlReturn_t begin_busy(const char *function, nvmlDevice_t device)
{
    nvmlReturn_t status = begin(function, device);
    FAIL_IF(in_mig_mode(device), NVML_ERROR_NOT_SUPPORTED);
    return status;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    nvmlReturn_t status = begin_busy(__func__, device);
    FAIL_IF(!utilization, NVML_ERROR_INVALID_ARGUMENT);
    if (status == NVML_SUCCESS)
        status = copy_number(device, "utilization.gpu", &utilization->gpu);
    if (status == NVML_SUCCESS)
        status = copy_number(device, "utilization.memory", &utilization->memory);
    return end(status);
}

struct buffer {
    nvmlSample_t *samples; /* NULL: only the size is asked for */
    unsigned int room, found;
    unsigned long long since;
};

static void add_sample(struct buffer *buffer, unsigned long long time, unsigned int value)
{
    if (time <= buffer->since || buffer->found >= buffer->room)
        return;
    buffer->samples[buffer->found].timeStamp = time;
    buffer->samples[buffer->found].sampleValue.ullVal = 0;
    buffer->samples[buffer->found++].sampleValue.uiVal = value;
}

static void add_given(struct buffer *buffer, const char *text)
{
    for (char *rest; *text; text = *rest ? rest + 1 : rest) {
        unsigned long long time = strtoull(text, &rest, 10);
        unsigned long long value = *rest == ':' ? strtoull(rest + 1, &rest, 10) : 0;
        add_sample(buffer, time, (unsigned int)value);
    }
}

static unsigned int count_given(const char *text)
{
    unsigned int count = 1;
    for (; *text; text++)
        count += *text == ' ';
    return count;
}

static nvmlReturn_t read_samples(nvmlDevice_t device, struct buffer *buffer)
{
    const char *text = text_of(device, "utilization.gpu"), *given = text_of(device, "samples.gpu");
    unsigned long long now;
    nvmlReturn_t status = integer(given ? given : text, &now);
    if (status != NVML_SUCCESS)
        return status;
    const long long period = 166667, count = 99; /* nvidia-smi -q -d UTILIZATION: 99 in 16.5 s */
    if (!buffer->samples) {
        buffer->found = given ? count_given(given) : (unsigned int)count;
        return NVML_SUCCESS;
    }
    if (given)
        add_given(buffer, given);
    long long last = now_us() / period;
    for (long long n = last - count + 1; !given && n <= last; n++)
        add_sample(buffer, (unsigned long long)(n * period),
                   (unsigned int)lround(mean_between(text, (n - 1) * period, n * period)));
    return buffer->found ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, nvmlSamplingType_t type,
                                  unsigned long long since, nvmlValueType_t *value_type,
                                  unsigned int *count, nvmlSample_t *samples)
{
    nvmlReturn_t status = begin_busy(__func__, device);
    FAIL_IF(!count || !value_type || (samples && !*count), NVML_ERROR_INVALID_ARGUMENT);
    FAIL_IF(type != NVML_GPU_UTILIZATION_SAMPLES, NVML_ERROR_NOT_SUPPORTED);
    if (status == NVML_SUCCESS) {
        struct buffer buffer = {samples, *count, 0, since};
        status = read_samples(device, &buffer);
        *value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
        *count = buffer.found;
    }
    return end(status);
}
