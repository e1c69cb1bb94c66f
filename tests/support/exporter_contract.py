# SPDX-License-Identifier: Apache-2.0
"""The names of all series that the exporter owes: changing one breaks somebody's dashboard."""

from __future__ import annotations

# of GPUs and of MIG instances
CLAIM = """utilization_ratio busy_seconds_total observed_seconds_total memory_used_bytes
    memory_total_bytes sm_active_ratio sm_occupancy_ratio tensor_active_ratio
    dram_active_ratio state lock_acquired_timestamp_seconds idle_since_timestamp_seconds
    last_busy_timestamp_seconds foreign_processes quarantine_info responding
    lock_info info"""
BOARD = """health memory_utilization_ratio power_watts energy_joules_total temperature_celsius
    sm_clock_hertz memory_clock_hertz
    clock_event_active clock_event_seconds_total xid_errors_total xid_last_timestamp_seconds
    power_limit_watts power_limit_enforced_watts memory_temperature_celsius
    driver_answer_seconds fan_ratio pcie_generation pcie_generation_max pcie_width_lanes
    pcie_width_max_lanes pcie_replays_total nvlink_active_links nvlink_errors_total fabric_state
    ecc_errors_total remapped_rows remapped_rows_pending remapped_rows_failure recovery_action
    share_info share_ratio share_places share_memory_used_bytes share_utilization_ratio
    share_idle_since_timestamp_seconds
    pcie_transmit_bytes_total pcie_receive_bytes_total nvlink_transmit_bytes_total
    nvlink_receive_bytes_total"""
NODE = """gpus reconcile_timestamp_seconds locks_reaped_total claims_total
    nvswitch_errors_total waiting lock_wait_seconds_total history_dropped_total nvml_up
    nvml_workers_abandoned sample_timestamp_seconds collector_success collector_duration_seconds
    config_last_reload_successful exporter_build_info"""
# of the exporter's own process, as every client of Prometheus names them
PROCESS = frozenset(
    f"process_{name}"
    for name in (
        *("virtual_memory_bytes", "resident_memory_bytes", "start_time_seconds"),
        *("cpu_seconds_total", "open_fds", "max_fds"),
    )
)
CONTRACT = frozenset(
    {
        *(f"gpulock_gpu_{name}" for name in (*CLAIM.split(), *BOARD.split())),
        *(f"gpulock_{name}" for name in NODE.split()),
    }
)
