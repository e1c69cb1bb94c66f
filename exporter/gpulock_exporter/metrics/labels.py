# SPDX-License-Identifier: Apache-2.0
"""What the values of labels may hold, and how the owner of a device is named."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from gpulock.store.owner import Owner

# Prometheus's own parser takes a NUL for the end of the text, so no control character but a new
# line is written; a surrogate is a byte that is no UTF-8, or half a character of JSON
WRITTEN = {
    code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000))
} | {ord("\n"): "\\n", ord('"'): '\\"', ord("\\"): "\\\\"}
LONGEST_LABEL = 256  # characters of a value


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


def label_text(pairs: Iterable[tuple[str, str]]) -> str:
    """Return labels as they are written, those without a value left out."""
    return ",".join(
        [f'{name}="{value[:LONGEST_LABEL].translate(WRITTEN)}"' for name, value in pairs if value]
    )
