# SPDX-License-Identifier: Apache-2.0
"""What is wrong with settings, where no job fails because of it.

`gpulock config --check` and doctor say it. gpulock.node.settings refuses the rest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import SplitResult, urlsplit

from gpulock.daemon.health.findings import POLICY_WORDS
from gpulock.daemon.idle.command import check_program_trust
from gpulock.node.settings import Settings

HIGHEST_PORT: Final = 65535
_LISTEN: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]*):([0-9]{1,5})")


def find_setting_faults(settings: Settings) -> Iterator[str]:
    """Yield `KEY=VALUE: what is wrong`, without what stands before the `@` of a URL."""
    for word in settings.quarantine_on:
        if word not in POLICY_WORDS:
            yield f"QUARANTINE_ON={word}: not one of {' '.join(POLICY_WORDS)}"
    for word in settings.exporter_listen:
        address = _LISTEN.fullmatch(word)
        if not address or int(address[1]) > HIGHEST_PORT:
            yield f"EXPORTER_LISTEN={word}: neither HOST:PORT, [IPv6]:PORT nor :PORT"
    url = settings.prometheus_url
    if url and parse_http_url(url) is None:
        shown = re.sub("^([a-z]*://)?.*@", r"\1", url)
        yield f"PROMETHEUS_URL={shown}: no valid http:// or https:// URL"
    if settings.web_config and not os.path.isfile(settings.web_config):
        yield f"WEB_CONFIG={settings.web_config}: no such file"
    programs = {
        "HEALTH_COMMAND": next(iter(settings.health_command), ""),
        "IDLE_COMMAND": settings.idle_command,
    }
    for name, program in programs.items():
        if program and (why := check_program_trust(program, settings.root_uid())):
            yield f"{name}={program}: not run, {why}"
    if settings.share_mps and not settings.shares:
        yield "SHARE_MPS=yes: no card has places without SHARES"
    if settings.idle_kill and not settings.idle_command:
        yield f"IDLE_KILL={settings.idle_kill:.0f}: ends no job without IDLE_COMMAND"


def parse_http_url(url: str) -> SplitResult | None:
    """Return the parts of an address of HTTP, None where it is none."""
    try:
        parts = urlsplit(url)
        return (
            parts
            if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            else None
        )
    except ValueError:
        return None
