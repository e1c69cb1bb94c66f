# SPDX-License-Identifier: Apache-2.0
"""What is asked of each card at each look, by collector.

Only the worker imports this. A collector fills in the records what it learns; the rest stays
absent. In MIG mode a card does not tell how busy it is, and its instances do by GPM alone.
"""

from __future__ import annotations

import pynvml

from gpulock_exporter.frame import DeviceTelemetry
from gpulock_exporter.nvml.answers import NAMED, NvmlDevice, PollContext, calls
from gpulock_exporter.nvml.card import NvmlCard, NvmlMigDevice, Records
from gpulock_exporter.nvml.field_values import ENERGY, NVLINK, POWER, read_fields
from gpulock_exporter.nvml.gpm import GPM, is_gpm_supported
from gpulock_exporter.nvml.process_lists import read_processes
from gpulock_exporter.nvml.utilisation_samples import NOTHING, BusyTime

SLOW = 5.0  # seconds between two looks at what changes seldom
TURNS = 8  # cards take turns within that time
WHOLE = 100  # percent
NO_SAMPLES = pynvml.NVML_ERROR_NOT_FOUND

BUSY_SAMPLES = "busy samples"  # what a card may not have
MEMORY_V2 = NAMED.bind("nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2)  # driver 510 or later


def collect_utilization(card: NvmlCard, records: Records, poll: PollContext) -> None:
    """How busy the card is now, and was since the last look."""
    if card.mig:
        return
    rates = card.query(poll, "utilization", calls.nvmlDeviceGetUtilizationRates)
    if rates is not None:
        records[0].utilization = rates.gpu / WHOLE
        records[0].memory_utilization = rates.memory / WHOLE
    sampled = _collect_busy_samples(card, poll)
    if rates is None and sampled is None:
        return
    now = card.samples.snapshot(rates.gpu, poll.now) if rates is not None else NOTHING
    busy, observed = sampled or NOTHING
    records[0].busy, records[0].observed = busy + now.busy, observed + now.observed


def _collect_busy_samples(card: NvmlCard, poll: PollContext) -> BusyTime | None:
    """Return what the driver's buffer says, None where it has none."""
    if card.is_absent(poll, BUSY_SAMPLES):
        return None
    since = card.samples.since(poll.now)
    kind = pynvml.NVML_GPU_UTILIZATION_SAMPLES
    try:
        samples = card.buffer.read(card.handle, kind, since)
    except pynvml.NVMLError as fault:
        if fault.value == NO_SAMPLES:
            return card.samples.add((), poll.now)
        absent = card.refused(poll, "utilization", BUSY_SAMPLES, fault.value)
        return None if absent else NOTHING
    busy = card.samples.add(samples, poll.now)
    if not card.samples.sound:
        poll.fail("utilization", card.lock_id, "its samples are impossible")
    return busy


def collect_memory(card: NvmlCard, records: Records, poll: PollContext) -> None:
    """Bytes in use, without what the driver reserves where it tells that apart.

    A card whose memory is the host's (GB10) tells none: there what its processes use, by the last
    list.
    """
    whose: list[NvmlDevice] = [card, *card.instances]
    for device, record in zip(whose, records):
        memory = device.query(poll, "memory", MEMORY_V2, calls.nvmlDeviceGetMemoryInfo)
        if memory is not None and memory.total:  # a card whose memory is the host's tells 0
            record.memory_used, record.memory_total = memory.used, memory.total
        elif device is card and (memory or card.is_absent(poll, calls.nvmlDeviceGetMemoryInfo)):
            record.memory_used = card.process_memory


def collect_power(card: NvmlCard, records: Records, poll: PollContext) -> None:
    """Watts, and joules since the driver was loaded."""
    values = read_fields(card, poll, (POWER, ENERGY))
    milliwatts = values.get(POWER)
    if card.is_absent(poll, POWER):
        milliwatts = card.query(poll, "power", calls.nvmlDeviceGetPowerUsage)
    if milliwatts is not None:
        records[0].power = milliwatts / 1e3
    if ENERGY in values:
        records[0].energy = values[ENERGY] / 1e3


def collect_gpm(card: NvmlCard, records: Records, poll: PollContext) -> None:
    """What the parts of the chip did, of the card or of each of its instances."""
    if not card.has_gpm:
        card.has_gpm = is_gpm_supported(card, poll)
    if not card.has_gpm:
        return
    for instance, record in zip(card.instances, records[1:]):
        _collect_instance_gpm(instance, record, poll)
    if card.mig:
        return
    measured = card.window.step(poll, card)
    if measured is not None:
        for name, count in measured.traffic.items():
            card.traffic[name] = card.traffic.get(name, 0) + count
    latest = card.window.latest
    if latest is not None:
        records[0].gpm = latest.ratios or None
        records[0].nvlink_summed = card.is_absent(poll, NVLINK[0])
        for name in latest.traffic:
            if name.startswith("pcie") or records[0].nvlink_summed:
                setattr(records[0], name, card.traffic[name])


def _collect_instance_gpm(
    instance: NvmlMigDevice, record: DeviceTelemetry, poll: PollContext
) -> None:
    """Measure one MIG device, where it has its GPU instance to itself."""
    if not instance.alone:
        instance.window.close()
        return
    measured = instance.window.step(poll, instance)
    latest = instance.window.latest
    if latest is None or latest.active is None:
        return
    record.gpm, record.utilization = latest.ratios or None, latest.active
    record.observed = measured.seconds if measured is not None else 0.0
    record.busy = record.observed * latest.active


def collect_slow_counters(card: NvmlCard, records: Records, poll: PollContext) -> None:
    """What is read at a slower rhythm; in between, what it was."""
    if poll.now >= card.slow.due:
        turn = SLOW / TURNS * (card.index % TURNS) if not card.slow.due else 0.0
        card.slow.due = poll.now + SLOW - turn
        windowed = card.has_gpm and not card.mig  # collect_gpm gives it there
        by_gpm = windowed and not card.is_absent(poll, GPM)
        card.slow.read(card, poll, nvlink=card.links is not None, pcie=not by_gpm)
    vars(records[0]).update(card.slow.values)
    for collector, fault in card.slow.failures.items():
        poll.fail(collector, "", fault)  # which names the card


def collect_processes(card: NvmlCard, records: Records, poll: PollContext) -> None:
    """Who is on the card, or on each of its instances; only at looks that ask for it."""
    if not poll.processes:
        return
    if not card.mig:
        listed = records[0].processes = read_processes(card, poll)
        known = listed is not None and None not in listed.values()
        card.process_memory = sum(filter(None, (listed or {}).values())) if known else None
    for instance, record in zip(card.instances, records[1:]):
        record.processes = read_processes(instance, poll)
