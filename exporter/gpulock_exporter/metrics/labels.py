# SPDX-License-Identifier: Apache-2.0
"""What the values of labels may hold, and how the owner of a device is named."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from gpulock.store.owner import Owner

# Prometheus's own parser takes a NUL for the end of the text, so no control character but a new
# line is written; a surrogate is a byte that is no UTF-8, or half a character of JSON
REPLACED = {
    code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000))
} | {ord("\n"): "\n"}
LONGEST_LABEL = 256  # characters of a value

Labels = dict[str, str]


class LabelUser(Enum):
    """What the label `user` holds (LABEL_USER)."""

    NAME = "name"
    UID = "uid"
    NONE = "none"

    def of(self, record: Owner) -> str:
        """Return the label's value for an owner, empty for none."""
        if self is LabelUser.NAME:
            return record.user
        return str(record.uid) if self is LabelUser.UID else ""


def owner_labels(record: Owner, label_user: LabelUser) -> list[tuple[str, str]]:
    """Return whose a claim is; the record's comment and paths stay where they are."""
    return [
        ("scheduler", record.scheduler),
        ("job_id", record.job_id),
        ("task_id", record.task_id),
        ("user", label_user.of(record)),
        ("queue", record.queue),
    ]


def known_labels(pairs: Iterable[tuple[str, str]]) -> Labels:
    """Return labels that can be written, those without a value left out."""
    return {name: value[:LONGEST_LABEL].translate(REPLACED) for name, value in pairs if value}
