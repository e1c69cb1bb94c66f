# SPDX-License-Identifier: Apache-2.0
"""The files of a web configuration: read whole, remembered to see them change, and taken apart.

PyYAML is imported when there is a file to read: it is an optional package, and costs 3 MiB.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from gpulock.errors import one_line

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from yaml import Node

_LARGEST = 1024 * 1024  # a CA bundle has a few hundred KiB


class WebConfigError(ValueError):
    """A mistake in a web configuration: nothing is served by it."""

    def __init__(self, path: str, line: int, what: str) -> None:
        super().__init__(f"{path}:{line}: {what}")


class Entry(NamedTuple):
    """The text of a key as it is written, and where the key stands."""

    value: str
    path: str
    line: int

    def fault(self, what: str) -> WebConfigError:
        """Return the error that names this place."""
        return WebConfigError(self.path, self.line, what)


Section = dict[str, Entry]


class WebConfigFiles:
    """Every file that was read for one configuration, as it was then."""

    def __init__(self) -> None:
        self._stamps: dict[str, tuple[int, ...]] = {}

    def read(self, path: str) -> bytes:
        """Read a file, and remember it; also when that fails, so that its repair is seen."""
        self._stamps[path] = _current_stamp(path)  # before the reading: a write meanwhile is seen
        # Not blocked by a pipe: a reload must come to an end.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "this is not a regular file")
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise OSError(errno.EFBIG, f"this is larger than {_LARGEST} bytes")
        return content

    def changed(self) -> bool:
        """Tell whether any of them is another one now, behind links too."""
        return any(_current_stamp(path) != stamp for path, stamp in self._stamps.items())


def _current_stamp(path: str) -> tuple[int, ...]:
    try:
        info = os.stat(path)
    except OSError:
        return ()
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def read_sections(
    path: str,
    files: WebConfigFiles,
    known: Mapping[str, Collection[str]],
    lists: Collection[str] = (),
) -> dict[str, Section]:
    """Read a YAML mapping of sections, which are mappings of texts; raise WebConfigError.

    `known` has the names of the sections, and the keys of each; none: any key. The values of
    `lists` are lists of texts, and come as one text, a comma between two.
    """
    try:
        content = files.read(path)
    except OSError as error:
        raise WebConfigError(path, 1, f"cannot be read: {error.strerror}") from error
    try:
        import yaml
    except ImportError as error:
        what = "this file needs PyYAML: pip install 'gpulock[web]' (Debian: python3-yaml)"
        raise WebConfigError(path, 1, what) from error
    try:
        top = yaml.compose(content.decode(), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        at = getattr(error, "start", getattr(error, "position", 0))  # where it is a character
        line = mark.line if mark else content.count(b"\n", 0, at)
        what = getattr(error, "problem", None) or one_line(str(error))
        raise WebConfigError(path, line + 1, f"this is no YAML: {what}") from error
    if top is None:
        return {}
    sections: dict[str, Section] = {}
    for name, (line, node) in _parse_mapping(path, top, 1, "this file", known).items():
        pairs = _parse_mapping(path, node, line, name, known[name]).items()
        texts = [
            (key, at, (_parse_list if key in lists else _parse_text)(path, text, at, key))
            for key, (at, text) in pairs
        ]
        sections[name] = {key: Entry(text, path, at) for key, at, text in texts}
    return sections


def _parse_mapping(
    path: str, node: Node, line: int, what: str, known: Collection[str]
) -> dict[str, tuple[int, Node]]:
    """Return the line and the value of each key."""
    from yaml import MappingNode

    if not isinstance(node, MappingNode) or not node.value:
        raise WebConfigError(path, line, f"{what} is not a mapping with at least one key")
    found: dict[str, tuple[int, Node]] = {}
    pairs: list[tuple[Node, Node]] = node.value
    for key_node, value in pairs:
        at = key_node.start_mark.line + 1
        key = _parse_text(path, key_node, at, "a key")
        if known and key not in known:
            why = f"{key} is not supported; supported are {', '.join(known)}"
            raise WebConfigError(path, at, why)
        if key in found:
            raise WebConfigError(path, at, f"{key} comes twice")
        found[key] = at, value
    return found


def _parse_text(path: str, node: Node, line: int, what: str) -> str:
    from yaml import ScalarNode

    if not isinstance(node, ScalarNode) or not node.value or node.tag.endswith(":null"):
        raise WebConfigError(path, line, f"{what} is not a text: write one, or leave it out")
    return str(node.value)


def _parse_list(path: str, node: Node, line: int, what: str) -> str:
    from yaml import SequenceNode

    if not isinstance(node, SequenceNode) or not node.value:
        raise WebConfigError(path, line, f"{what} is not a list: write one, or leave it out")
    entries: list[Node] = node.value
    return ",".join(_parse_text(path, entry, line, what) for entry in entries)
