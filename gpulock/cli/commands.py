# SPDX-License-Identifier: Apache-2.0
"""The commands of `gpulock`: a table, from which each is imported when it is used."""

from __future__ import annotations

from typing import Final

# section, then command, its module and function, and what it does, as `gpulock --help` shows them
COMMANDS: Final[tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...]] = (
    (
        "Look",
        (
            ("status", "status.status:status_command", "Show every GPU and who holds it."),
            ("why", "why.why:why_command", "Explain the state of a job or device."),
            ("report", "history.report:job_report_command", "Show what a job's GPUs did."),
            (
                "history",
                "history.history:history_command",
                "Show finished claims and their GPU hours.",
            ),
            ("inventory", "admin.inventory:inventory_command", "Show the devices and their links."),
            (
                "config",
                "admin.config:config_command",
                "Show every setting, or check a settings file.",
            ),
        ),
    ),
    (
        "Hold GPUs",
        (
            ("run", "claims.run:run_command", "Run a command with its own GPUs."),
            ("claim", "claims.claim:claim_command", "Hold GPUs for a process, such as this shell."),
            ("release", "claims.release:release_command", "Release GPUs."),
            ("queue", "claims.queue:queue_command", "Show who waits for GPUs, and why."),
        ),
    ),
    (
        "Administer",
        (
            ("reap", "admin.reap:reap_command", "Free what dead owners hold, with the proof."),
            ("reserve", "admin.devices:reserve_command", "Lock a device for administration."),
            ("unreserve", "admin.devices:unreserve_command", "End a reserve."),
            ("quarantine", "admin.devices:quarantine_command", "Take a device out of service."),
            ("restore", "admin.devices:restore_command", "Put a device back into service."),
            ("test", "admin.gpu_test:test_command", "Test GPUs once they are free."),
            ("reset", "admin.reset:reset_command", "Reset a GPU that nobody uses."),
            (
                "forget-locks",
                "admin.forget:forget_locks_command",
                "Grant again where the records were lost.",
            ),
        ),
    ),
    (
        "Set up",
        (
            ("install", "admin.install:install_group", "Install hooks or services."),
            ("uninstall", "admin.install:uninstall_command", "Remove hooks or services."),
            ("doctor", "admin.install:doctor_command", "Check this node and its scheduler."),
            ("cdi", "admin.inventory:cdi_command", "Print the CDI spec for podman and Docker."),
            ("simulate", "admin.simulate:simulate_command", "Write a simulated node for tests."),
        ),
    ),
)
NAMES: Final = [name for _, commands in COMMANDS for name, _, _ in commands]
