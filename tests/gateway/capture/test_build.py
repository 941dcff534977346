"""A record has only what is new since earlier calls, and becomes whole again, however the session branched."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcore_rl_toolkit.gateway.capture.build import Texts, complete, pack_long_prompt
from agentcore_rl_toolkit.gateway.capture.record import (
    ERROR,
    INVALID,
    OK,
    PARTIAL,
    CallRecord,
    Captured,
    ChoiceRecord,
    pack_ids,
    pack_logprobs,
    unpack_ids,
)
from agentcore_rl_toolkit.gateway.capture.turns import expand, message_lists

IDS = st.lists(st.integers(0, 12) | st.integers(0, 2**31 - 1), max_size=4)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]), "content": st.text('a],[{\\"é', max_size=4)}
)


def recorded(texts: Texts, index: int, prompt: list[int], answers: list[list[int]], messages: Any) -> CallRecord:
    choices = [
        ChoiceRecord(place, pack_ids(ids), pack_logprobs([-0.5] * len(ids)), "stop", "none", b"{}")
        for place, ids in enumerate(answers)
    ]
    captured = Captured(choices, prompt=json.dumps(prompt, separators=(",", ":")).encode(), has_tokens=True)
    if index % 2:  # as a thread does with a long prompt
        pack_long_prompt(texts, captured)
        assert captured.prompt_ids in (None, pack_ids(prompt))
    elif index % 4:  # as in token mode
        captured.prompt_ids = pack_ids(prompt)
    record = new_record(OK, f"c{index}", index)
    record.request = b'{"model":"m"}'
    complete(
        record,
        captured,
        json.dumps(messages, ensure_ascii=False).encode(),
        texts,
        published=(None, None),
        stream=False,
    )
    return record


def new_record(status: str, call_id: str = "c", index: int = 0) -> CallRecord:
    return CallRecord(call_id=call_id, index=index, status=status, dialect="chat", started_s=0.0, finished_s=0.0)


@given(st.data(), st.integers(1, 14))
def test_prompts_and_messages_come_back_however_a_session_branched(data: st.DataObject, calls: int) -> None:
    texts = Texts()
    records: list[CallRecord] = []
    prompts: list[list[int]] = []
    answers: list[list[list[int]]] = []
    histories: list[list[Any]] = []
    for index in range(calls):
        prompt: list[int] = []
        messages: list[Any] = []
        if index and data.draw(st.booleans()):
            before = data.draw(st.integers(0, index - 1))
            prompt = prompts[before] + data.draw(st.sampled_from([[], *answers[before]]))
            prompt = prompt[: data.draw(st.integers(0, len(prompt)))] if data.draw(st.booleans()) else prompt
            messages = histories[before][: data.draw(st.integers(0, len(histories[before])))]
        prompts.append(prompt + data.draw(IDS))
        histories.append(messages + data.draw(st.lists(MESSAGE, max_size=3)))
        answers.append(data.draw(st.lists(IDS, min_size=1, max_size=2)))
        records.append(recorded(texts, index, prompts[-1], answers[-1], histories[-1]))
    assert message_lists(records) == histories
    turns = expand(records).turns
    assert [t.prompt_ids for t in turns] == [p for p, each in zip(prompts, answers, strict=True) for _ in each]
    assert [t.completion_ids for t in turns] == [ids for each in answers for ids in each]


@pytest.mark.parametrize("side_calls", [False, True])
def test_a_growing_session_costs_its_tokens_once_also_with_calls_that_have_only_its_beginning(side_calls: bool) -> None:
    texts, prompt, messages, size = Texts(), [1], [{"role": "user", "content": "x" * 100}], 0
    for index in range(50):
        record = recorded(texts, index, prompt, [[7] * 10], messages)
        size += len(record.prompt_ids) + len(record.messages) + len(record.request)
        if side_calls:
            recorded(texts, 100 + index, prompt[:1], [[8]], messages[:1])
        prompt = [*prompt, *[7] * 10, *[index] * 10]
        messages = [*messages, {"role": "user", "content": f"{index}" + "x" * 100}]
    assert size < 50 * 200


@pytest.mark.parametrize("text", [b"[1,x]", b"[1.5]", b"[99999999999999999999]", b"[1,,2]", b"{}", b"7"])
def test_a_prompt_that_is_no_list_of_token_ids_makes_the_turn_invalid(text: bytes) -> None:
    captured = Captured([], prompt=text, has_tokens=True)
    pack_long_prompt(Texts(), captured)
    record = new_record(OK)
    complete(record, captured, b"", Texts(), published=(None, None), stream=False)
    assert (record.status, record.prompt_ids) == (INVALID, b"")


def test_a_prompt_that_a_thread_packed_is_used_unless_it_continues_a_call_that_ended_meanwhile() -> None:
    texts, records = Texts(), [new_record(OK, "a"), new_record(OK, "b", 1)]
    packed = [Captured([], prompt=text, has_tokens=True) for text in (b"[1,2]", b"[1,2,3]")]
    for captured in packed:
        pack_long_prompt(texts, captured)
    packed[0].prompt_ids = pack_ids([8, 9])  # not packed a second time
    for record, captured in zip(records, packed, strict=True):
        complete(record, captured, b"", texts, published=(None, None), stream=False)
    assert [unpack_ids(record.prompt_ids) for record in records] == [[8, 9], [3]]
    assert (records[1].prompt_base.call_id, records[1].prompt_base.length) == ("a", 2)


@pytest.mark.parametrize(("status", "ids"), [(OK, [1, 2]), (PARTIAL, [1, 2]), (INVALID, [1, 2]), (ERROR, [])])
def test_a_prompt_is_stored_with_a_reply_and_not_with_a_failure(status: str, ids: list[int]) -> None:
    record = new_record(status)
    complete(
        record,
        Captured([], prompt=b"[1,2]", has_tokens=True),
        b"",
        Texts(),
        published=(None, None),
        stream=False,
    )
    assert (record.status, unpack_ids(record.prompt_ids)) == (status, ids)
