# SPDX-License-Identifier: Apache-2.0
"""YAML read with the line of every key and value, so that a mistake is named where it stands.

Imported only when a web configuration is there to be read: PyYAML costs 3 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.reader import ReaderError

from gpulock_exporter.webconfig.files import WebConfigError

_BOOLEANS = {"true": True, "false": False}  # as the format says; yes, on and 1 are refused


@dataclass(frozen=True, slots=True)
class Text:
    """A scalar as it is written, and its line."""

    value: str
    line: int


class Section:
    """A YAML mapping of which every key is taken, or is a mistake."""

    def __init__(self, path: str, node: MappingNode) -> None:
        self._path = path
        self._nodes: dict[str, tuple[int, Node]] = {}
        pairs: list[tuple[Node, Node]] = node.value
        for key_node, value_node in pairs:
            key = self._text(key_node, "a key")
            if key.value in self._nodes:
                self.fail(key.line, f"{key.value} comes twice")
            self._nodes[key.value] = (key.line, value_node)

    def fail(self, line: int, what: str) -> NoReturn:
        """Raise the error that names this file and that line."""
        raise WebConfigError(self._path, line, what)

    def line_of(self, key: str) -> int:
        """Return the line of a key that is not taken yet; 1 when it is not there."""
        return self._nodes[key][0] if key in self._nodes else 1

    def text(self, key: str) -> Text | None:
        """Take a string."""
        found = self._nodes.pop(key, None)
        return None if found is None else self._text(found[1], key)

    def flag(self, key: str) -> bool | None:
        """Take a boolean."""
        text = self.text(key)
        if text is None:
            return None
        if text.value not in _BOOLEANS:
            self.fail(text.line, f"{key} is true or false, not {text.value!r}")
        return _BOOLEANS[text.value]

    def texts(self, key: str) -> list[Text]:
        """Take a list of strings; one that is written must not be empty."""
        found = self._nodes.pop(key, None)
        if found is None:
            return []
        line, node = found
        if not isinstance(node, SequenceNode) or not node.value:
            self.fail(line, f"{key} is a list with at least one entry, or is left out")
        items: list[Node] = node.value
        return [self._text(item, f"an entry of {key}") for item in items]

    def section(self, key: str) -> Section | None:
        """Take a mapping; one that is written must not be empty."""
        found = self._nodes.pop(key, None)
        if found is None:
            return None
        line, node = found
        if not isinstance(node, MappingNode) or not node.value:
            self.fail(line, f"{key} is a mapping with at least one key, or is left out")
        return Section(self._path, node)

    def pairs(self) -> list[tuple[Text, Text]]:
        """Take every key, with its string."""
        taken = [
            (Text(key, line), self._text(node, key)) for key, (line, node) in self._nodes.items()
        ]
        self._nodes.clear()
        return taken

    def end(self, known: str) -> None:
        """Raise for the first key that nothing took."""
        for key, (line, _) in self._nodes.items():
            self.fail(line, f"{key} is not known here; known are {known}")

    def _text(self, node: Node, what: str) -> Text:
        line = node.start_mark.line + 1
        if not isinstance(node, ScalarNode):
            self.fail(line, f"{what} is a string, not a list or a mapping")
        if node.tag == "tag:yaml.org,2002:null":
            self.fail(line, f"{what} has no value: write one, or leave it out")
        return Text(str(node.value), line)


def read_yaml(path: str, content: bytes) -> Section | None:
    """Read a document that is a mapping; None for an empty one."""
    try:
        text = content.decode()
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise WebConfigError(path, line, "this is not UTF-8") from error
    except ReaderError as error:  # says the character, not the line
        line = content.decode()[: error.position].count("\n") + 1
        raise WebConfigError(path, line, str(error.reason)) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise WebConfigError(path, mark.line + 1 if mark else 1, str(error.problem)) from error
    except (ValueError, OverflowError) as error:  # an escape of a character that there is not
        raise WebConfigError(path, 1, f"this is no YAML: {error}") from error
    except RecursionError as error:
        raise WebConfigError(path, 1, "this is nested too deeply") from error
    if node is None:
        return None
    if not isinstance(node, MappingNode):
        raise WebConfigError(path, node.start_mark.line + 1, "this is not a mapping of keys")
    return Section(path, node)
