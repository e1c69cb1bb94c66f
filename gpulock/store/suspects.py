# SPDX-License-Identifier: Apache-2.0
"""LOCK_DIR/suspects: cards that the driver lists and does not answer for; a claim takes them last.

Hot, loaded only where the file is there. gpulockd writes it by the exporter's word. So it is a
preference: it refuses no job a device, and what cannot be read of it counts as nothing.
"""

import os

from gpulock.store import atomic, kv

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "suspects"
VERSION_LINE = "gpulock-suspects 1"


def write_suspect_cards(lock_dir: str, found: "Mapping[str, str]", boot_id: str) -> None:
    """Replace why each card is suspect, by bus id; without any the file goes. Raises OSError."""
    path = f"{lock_dir}/{NAME}"
    if found:
        text = f"{VERSION_LINE}\n{kv.encode_pairs([('boot_id', boot_id), *sorted(found.items())])}"
        atomic.replace_file(path, text.encode("utf-8", "replace"))
    else:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return


def read_suspect_cards(lock_dir: str, boot_id: str) -> dict[str, str]:
    """Return why each card is suspect, by bus id; nothing where that is not known."""
    try:
        pairs = kv.decode_pairs(atomic.read_text(f"{lock_dir}/{NAME}"), VERSION_LINE)
    except (OSError, kv.MalformedError):
        return {}
    return pairs if pairs.pop("boot_id", "") == boot_id else {}
