"""Recognising a text that starts with an earlier one, whether that was kept whole or folded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentcore_rl_toolkit.gateway.capture.prefix_index import Budget, Prefixes, Seen


@given(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=6), st.binary(max_size=60), st.booleans())
def test_the_longest_earlier_text_is_found_folded_or_whole(texts: list[bytes], more: bytes, fold: bool) -> None:
    prefixes = Prefixes()
    for i, text in enumerate(texts):
        seen = Seen(text, str(i), 0)
        if fold:
            seen.fold()
        prefixes._seen.append(seen)
    for text in texts:
        grown = text + more
        found = prefixes.longest(grown)
        assert found is not None
        assert found.length == max(len(t) for t in texts if grown.startswith(t))
        assert grown.startswith(texts[int(found.call_id)])


def test_texts_beyond_the_budget_are_folded_oldest_first() -> None:
    budget = Budget(limit=1000)
    seen = [Seen(b"%03d" % i + b"x" * 97, str(i), 0) for i in range(20)]
    for each in seen:
        budget.keep(each)
    assert budget.held <= 1000
    assert [s.text is None for s in seen] == [True] * 10 + [False] * 10
    assert all(s.begins(b"%03d" % i + b"x" * 97 + b"more") for i, s in enumerate(seen))
    assert not seen[0].begins(b"001" + b"x" * 97)
    big = Seen(b"y" * 500, "0", 0)
    budget.keep(big)
    assert big.text is None, "one long session must not push out all others"


def test_branches_beyond_the_limit_are_forgotten() -> None:
    prefixes = Prefixes()
    for i in range(50):
        prefixes.add(Seen(b"%02d branch" % i, str(i), 0))
    assert len(prefixes._seen) <= 8
    found = prefixes.longest(b"49 branch goes on")
    assert found is not None
    assert found.call_id == "49"
    prefixes.clear()
    assert prefixes.longest(b"49 branch goes on") is None
