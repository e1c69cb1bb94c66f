# SPDX-License-Identifier: Apache-2.0
"""What is read out of NVML's lists without pynvml lies where pynvml says, and the driver wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from gpulock_exporter.nvml.answers import VALUES
from gpulock_exporter.nvml.field_values import FIELD
from gpulock_exporter.nvml.gpm import METRIC
from gpulock_exporter.nvml.utilisation_samples import SAMPLES, SampleList

from tests.nvml.double import Double

NVML: Any = pynvml  # of its structures the stub declares what gpulock uses
UTILIZATION = NVML.NVML_GPU_UTILIZATION_SAMPLES
NEW = "610.43.02"  # as in tests/unit/nvml_double: a process has one library
MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by nvmlValueType_t


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    monkeypatch.setenv("NVML_DOUBLE", "")  # so that it is put back
    with Double(tmp_path / "nvml", preset="dgx1", gpus=2, driver=NEW) as double:
        double.load_here()
        NVML.nvmlInit()
        yield double
        NVML.nvmlShutdown()


@pytest.mark.parametrize(("kind", "member"), list(enumerate(MEMBERS)))
def test_a_value_of_each_type_lies_where_pynvml_has_it(kind: int, member: str) -> None:
    number = 0.25 if member == "dVal" else 54321
    sample = NVML.c_nvmlSample_t()
    sample.timeStamp = 1 << 50
    setattr(sample.sampleValue, member, number)
    assert SAMPLES[kind].unpack(bytes(sample)) == (1 << 50, number)
    assert VALUES[kind].unpack(bytes(sample.sampleValue)) == (number,)


def test_a_field_value_lies_where_pynvml_has_it() -> None:
    entry = NVML.c_nvmlFieldValue_t()
    entry.fieldId, entry.scopeId, entry.timestamp, entry.latencyUsec = 83, 7, -1, -2
    entry.valueType, entry.nvmlReturn, entry.value.ullVal = 3, 999, 1 << 40
    *head, value = FIELD.unpack(bytes(entry))
    assert head == [83, 7, -1, -2, 3, 999]
    assert VALUES[3].unpack(value) == (1 << 40,)


def test_a_metric_of_gpm_lies_where_pynvml_has_it() -> None:
    metric = NVML.c_nvmlGpmMetric_t()
    metric.metricId, metric.nvmlReturn, metric.value = 20, 3, 0.5
    assert METRIC.unpack(bytes(metric)) == (20, 3, 0.5)


def test_samples_are_what_pynvml_gets_of_any_age(nvml: Double) -> None:
    handle, samples = NVML.nvmlDeviceGetHandleByIndex(0), SampleList()
    nvml.samples(0, "gpu", [(moment, moment % 100) for moment in range(1000, 1099)])
    for since in (0, 1000, 1050, 1097):
        _, told = NVML.nvmlDeviceGetSamples(handle, UTILIZATION, since)
        pairs = [(one.timeStamp, one.sampleValue.uiVal) for one in told]
        assert samples.read(handle, UTILIZATION, since) == pairs
        assert len(pairs) == 1098 - max(since, 999)
