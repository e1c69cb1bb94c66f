# SPDX-License-Identifier: Apache-2.0
"""Which format and which encoding a client wants, and by when: from its headers alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import Enum

IDENTITY = "identity"
GZIP = "gzip"

# Prometheus gives up at its own timeout; what arrives just before that is too late for it.
SCRAPE_TIMEOUT_OFFSET_SECONDS = 0.5
LONGEST_SCRAPE_SECONDS = 300.0


class Format(Enum):
    """A way to write metrics; the value is its Content-Type."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def negotiate_format(accept: str) -> Format:
    """Choose by an Accept header: the highest q, then the first named; text when nothing fits.

    As in Prometheus's own expfmt: a version that we do not write is passed over, not refused.
    """
    for _, name, parameters in sorted(_parse_weighted_header(accept), key=lambda item: -item[0]):
        version = parameters.get("version")
        if name == "application/openmetrics-text" and version in {None, "1.0.0"}:
            return Format.OPENMETRICS
        if name in {"text/plain", "text/*", "*/*"} and version in {None, "0.0.4"}:
            return Format.TEXT
    return Format.TEXT


def negotiate_encoding(accept_encoding: str) -> str:
    """Choose gzip where the client takes it, else identity."""
    weights = {name: q for q, name, _ in _parse_weighted_header(accept_encoding, keep_refused=True)}
    wanted = weights.get("gzip", weights.get("x-gzip", weights.get("*", 0.0)))
    return GZIP if wanted > 0 else IDENTITY


def scrape_deadline(headers: Mapping[str, str], now: float, longest: float) -> float:
    """Return when an answer is of no more use, by X-Prometheus-Scrape-Timeout-Seconds.

    Without that header, or with one that makes no sense, it is `longest` seconds from now.
    """
    try:
        seconds = float(headers.get("x-prometheus-scrape-timeout-seconds", ""))
    except ValueError:
        return now + longest
    if not (math.isfinite(seconds) and seconds > 0):
        return now + longest
    usable = max(seconds - SCRAPE_TIMEOUT_OFFSET_SECONDS, seconds / 2)
    return now + min(usable, LONGEST_SCRAPE_SECONDS)


def _parse_weighted_header(
    header: str, keep_refused: bool = False
) -> Iterator[tuple[float, str, dict[str, str]]]:
    for element in header.split(","):
        name, *rest = (part.strip() for part in element.split(";"))
        parameters = {
            key.strip().lower(): value.strip().strip('"')
            for key, _, value in (part.partition("=") for part in rest)
        }
        q = _parse_quality(parameters.pop("q", "1"))
        if name and (q > 0 or keep_refused):
            yield q, name.lower(), parameters


def _parse_quality(text: str) -> float:
    try:
        q = float(text)
    except ValueError:
        return 0.0
    return q if 0 <= q <= 1 else 0.0  # not a number compares false as well
