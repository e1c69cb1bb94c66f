# SPDX-License-Identifier: Apache-2.0
"""The key=value lines under every small file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulock.store import kv

VALUES = st.text().filter(kv.is_single_line)
KEYS = st.text(min_size=1).filter(lambda key: kv.is_single_line(key) and "=" not in key)


@given(st.dictionaries(KEYS, VALUES))
def test_what_is_encoded_is_decoded_again(pairs: dict[str, str]) -> None:
    assert kv.decode_pairs(kv.encode_pairs(list(pairs.items()))) == pairs


@given(st.text())
def test_any_text_is_either_pairs_or_malformed(text: str) -> None:
    try:
        pairs = kv.decode_pairs(text)
    except kv.MalformedError:
        return
    assert all(key and "=" not in key for key in pairs)


@pytest.mark.parametrize("bad", ["a\nb", "a\rb", "\x00", "\x1b[31m", "tab\t", "\x7f"])
def test_a_control_character_is_not_written(bad: str) -> None:
    assert not kv.is_single_line(bad)
    with pytest.raises(kv.MalformedError):
        kv.encode_pairs([("key", bad)])
    with pytest.raises(kv.MalformedError):
        kv.encode_pairs([(bad, "value")])


@pytest.mark.parametrize("head", ["gpulock-owner 2", "gpulock-owner 1 ", "", "gpulock-owner 10"])
def test_another_version_line_is_malformed(head: str) -> None:
    with pytest.raises(kv.MalformedError, match="begins with"):
        kv.decode_pairs(f"{head}\na=b\n", "gpulock-owner 1")


@pytest.mark.parametrize("key", ["", "a=b"])
def test_a_key_that_could_not_be_read_back_is_not_written(key: str) -> None:
    with pytest.raises(kv.MalformedError):
        kv.encode_pairs([(key, "value")])


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "²", "9" * 31, "9" * 5000])
def test_what_is_no_number_counts_as_0(text: str) -> None:
    assert kv.int_or_zero(text) == 0
