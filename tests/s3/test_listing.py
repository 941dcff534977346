"""Pages of listings against a definition by brute force, for any keys, prefixes, delimiters and page sizes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from sortedcontainers import SortedList

from agentcore_rl_toolkit.s3.listing import page

LETTERS = st.sampled_from(["a", "b", "/", "-", "é", "\ud7ff", "\ue000", "\U0010ffff"])
KEYS = st.lists(st.text(LETTERS, min_size=1, max_size=7), max_size=25)
PREFIX = st.text(LETTERS, max_size=3)
DELIMITER = st.sampled_from(["", "/", "-", "--", "a/", "\U0010ffff"])


def whole_listing(keys: list[str], prefix: str, delimiter: str) -> list[tuple[str, bool]]:
    """The definition: keys with the prefix, rolled up at the first delimiter after it, in byte order."""
    found: set[tuple[str, bool]] = set()
    for key in keys:
        if key.startswith(prefix):
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            found.add((key, False) if end < 0 else (key[: end + len(delimiter)], True))
    return sorted(found, key=lambda e: (e[0].encode(), e[1]))


@settings(max_examples=130, deadline=None)
@given(keys=KEYS, prefix=PREFIX, delimiter=DELIMITER, limit=st.integers(1, 6))
def test_pages_together_are_the_whole_listing(keys: list[str], prefix: str, delimiter: str, limit: int) -> None:
    index = SortedList(set(keys))
    after, seen = "", []
    for _ in range(len(keys) + 2):
        found = page(index, prefix=prefix, delimiter=delimiter, after=after, limit=limit)
        assert len(found.entries) <= limit
        seen += found.entries
        if found.last is None:
            break
        assert found.last == found.entries[-1][0]
        after = found.last
    else:
        raise AssertionError("the listing does not end")
    assert seen == whole_listing(keys, prefix, delimiter)


@settings(max_examples=100, deadline=None)
@given(keys=KEYS, prefix=PREFIX, after=st.text(LETTERS, max_size=7))
def test_start_after_leaves_out_exactly_what_sorts_up_to_it(keys: list[str], prefix: str, after: str) -> None:
    found = page(SortedList(set(keys)), prefix=prefix, delimiter="", after=after, limit=1000)
    expected = sorted({k for k in keys if k.startswith(prefix) and k.encode() > after.encode()}, key=str.encode)
    assert [name for name, _ in found.entries] == expected


@settings(max_examples=100, deadline=None)
@given(keys=KEYS, prefix=PREFIX, after=st.text(LETTERS, max_size=7), delimiter=DELIMITER)
def test_a_common_prefix_up_to_the_marker_is_not_listed_again(
    keys: list[str], prefix: str, after: str, delimiter: str
) -> None:
    found = page(SortedList(set(keys)), prefix=prefix, delimiter=delimiter, after=after, limit=1000)
    expected = [e for e in whole_listing(keys, prefix, delimiter) if e[0].encode() > after.encode()]
    assert found.entries == expected
