"""Which conversations train: the rule of a session, over the situations that real agents make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.trajectory import Trajectory, Turn, build_trajectory
from agentcore_rl_toolkit.trajectory.turn import FLOWS

TOOLS = ("read", "edit")
SYSTEM = [1, 2, 3, 4]  # of the main agent
OTHER = list(range(900, 940))  # a prompt that shares nothing with it


class Session:
    """Turns in the order of their calls."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.fresh = iter(range(1000, 100_000))

    def ids(self, count: int) -> list[int]:
        return [next(self.fresh) for _ in range(count)]

    def call(self, prompt: list[int], sampled: int | list[int] = 8, **more: Any) -> list[int]:
        """Append a call; what was said so far."""
        completion = sampled if isinstance(sampled, list) else self.ids(sampled)
        fields: dict[str, Any] = {"tools": TOOLS, "system": "main", "finish_reason": "stop", **more}
        index = len(self.turns)
        self.turns.append(
            Turn(
                turn_id=f"t{index}",
                index=index,
                prompt_ids=prompt,
                completion_ids=completion,
                logprobs=[-0.5] * len(completion),
                **fields,
            )
        )
        return prompt + completion

    def built(self, train: str = "task") -> Trajectory:
        return build_trajectory("s", self.turns, train=train)

    def trained(self, train: str = "task") -> set[str]:
        """The turns with tokens that train."""
        found = self.built(train)
        shown = {turn for s in found.sequences for turn in (*s.turn_ids, *s.context_turn_ids)}
        assert shown == {t.turn_id for t in self.turns}  # whatever trains, every turn is shown
        assert sum(s.weight for s in found.sequences) == pytest.approx(1.0 if found.report.trained_tokens else 0.0)
        for sequence in found.sequences:
            assert (sequence.side_call is None) is bool(sequence.trained_tokens)
            assert bool(sequence.weight) is bool(sequence.trained_tokens)
        return {turn for s in found.sequences if s.side_call is None for turn in s.turn_ids}


def title_then_task() -> Session:
    """As opencode does: a title first, without tools; then the task, with a sub-agent that it calls."""
    session = Session()
    session.call(OTHER, 10, tools=(), system="title")
    said = session.call(SYSTEM + session.ids(20), 20, parse_status="parsed", feeds={"t2": "called"})
    session.call(session.ids(30), 10, tools=("search",), system="helper", feeds={"t3": "quoted"})
    session.call(said + session.ids(5), 20)
    session.call(OTHER[::-1], 40, tools=None, system="memory")
    return session


def test_side_calls_do_not_train_and_sub_agents_do() -> None:
    session = title_then_task()
    assert session.trained() == {"t1", "t2", "t3"}
    assert session.trained("main") == {"t1", "t3"}
    assert session.trained("all") == {"t0", "t1", "t2", "t3", "t4"}
    report = session.built().report
    assert report.train == "task"
    assert report.side_calls == {"no_flow": 50}
    assert report.sequences == 2
    assert report.sequence_tokens == (4 + 20) + 20 + 5 + 20 + (30 + 10)
    assert report.trained_tokens == 50
    assert report.trained_token_share == 1.0
    assert [s.side_call for s in session.built().sequences] == [None, None, "no_flow", "no_flow"]
    assert session.built("main").report.side_calls == {"not_main": 60}


def test_the_root_is_the_first_conversation_that_offers_tools() -> None:
    session = Session()
    session.call(OTHER, 90, tools=())
    session.call(SYSTEM + session.ids(20), 10)
    session.call(OTHER[::-1], 90, tools=("search",), system="other")
    assert session.trained() == session.trained("main") == {"t1"}


def test_without_tools_in_any_conversation_all_train_and_the_first_is_the_root() -> None:
    session = Session()
    session.call(OTHER, 10, tools=())
    session.call(SYSTEM + session.ids(20), 30, tools=())
    assert session.trained() == {"t0", "t1"}
    assert session.trained("main") == {"t0"}


def test_another_conversation_of_the_same_agent_trains() -> None:
    session = Session()
    session.call(SYSTEM + session.ids(40), 10)
    session.call(OTHER, 10)
    session.call(OTHER[::-1], 10, tools=("read", "search"))
    session.call(session.ids(30), 10, tools=("search",), system="other")
    assert session.trained() == {"t0", "t1", "t2"}


def test_parallel_attempts_at_one_prompt_are_one_conversation_and_another_prompt_is_not() -> None:
    session = Session()
    prompt = SYSTEM + session.ids(20)
    for asked in (prompt, prompt, prompt[:-5] + session.ids(5)):
        session.call(asked, 10, started_s=0.0, finished_s=1.0)
    assert session.built("main").report.branch_reasons == {"parallel_calls": 2}
    assert session.trained("main") == {"t0", "t1"}


# How the second conversation has an answer of the root's only turn, whether it offers tools, and whether it trains.
TAKEN_UP = [
    *(("continued", True, True), ("continued", False, True), ("reviewed", True, False), ("reviewed", False, False)),
    *(("history", True, False), ("history", False, False), ("quoted", True, True), ("quoted", False, True)),
    *(("called", True, True), ("called", False, False), (None, True, False), (None, False, False)),
]


@pytest.mark.parametrize(("how", "offers", "trains"), TAKEN_UP)
def test_what_a_conversation_has_of_the_root_decides_and_an_answer_that_flows_back_always_trains(
    how: str | None, offers: bool, trains: bool
) -> None:
    for back in (None, *FLOWS):
        session = Session()
        said = session.call(SYSTEM + session.ids(20), 20, feeds={"t1": how} if how else {})
        tools = ("search",) if offers else ()
        session.call(OTHER, 10, tools=tools, system="other", feeds={"t2": back} if back else {})
        if back:
            session.call(said + session.ids(5), 20)
        assert ("t1" in session.trained()) is (trains or back is not None), back


@pytest.mark.parametrize(("how", "trains"), [("continued", False), ("quoted", False)])
def test_a_question_on_the_way_is_a_side_call_where_the_root_goes_on_without_it(how: str, trains: bool) -> None:
    session = Session()
    said = session.call(SYSTEM + session.ids(20), 20, feeds={"t1": how})
    session.call(OTHER, 10, tools=(), system="other")
    session.call(said + session.ids(5), 20)
    assert session.trained() == {"t0", "t2"}


def test_a_call_without_tools_beside_others_after_the_end_is_a_side_call() -> None:
    for started_s, trains in ((2.5, False), (4.0, True)):
        session = Session()
        session.call(SYSTEM + session.ids(20), 20, feeds={"t1": "quoted"}, started_s=0.0, finished_s=1.0)
        session.call(OTHER, 10, tools=(), system="topic", started_s=2.0, finished_s=3.0)
        session.call(OTHER[::-1], 10, tools=(), system="notes", started_s=started_s, finished_s=5.0)
        assert ("t1" in session.trained()) is trains


@st.composite
def flowing(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Conversations of a few turns, and what flows between them."""
    plan = []
    for number in range(draw(st.integers(2, 5))):
        tools = draw(st.sampled_from([(), ("read",), ("read", "edit"), ("search",)]))
        system = draw(st.sampled_from(["main", "helper", f"own {number}"]))
        plan += [{"of": number, "tools": tools, "system": system} for _ in range(draw(st.integers(1, 3)))]
    plan = draw(st.permutations(plan))
    for index, call in enumerate(plan):
        later = [at for at in range(index + 1, len(plan)) if plan[at]["of"] != call["of"]]
        fed = draw(st.lists(st.sampled_from(later), max_size=2)) if later else []
        call["feeds"] = {f"t{at}": draw(st.sampled_from(FLOWS)) for at in fed}
        call["tag"] = draw(st.sampled_from([None] * 5 + ["judge"]))
    return plan


@given(flowing(), st.integers(0, 4), st.integers(2, 60))
def test_multiplying_the_sampled_tokens_of_a_conversation_changes_nothing(
    plan: list[dict[str, Any]], grown: int, times: int
) -> None:
    found = []
    for factor in (1, times):
        session = Session()
        said: dict[int, list[int]] = {}
        for call in plan:
            facts = {key: value for key, value in call.items() if key != "of"}
            prompt = said.get(call["of"], [1, 2, 3, 4]) + session.ids(9)
            said[call["of"]] = session.call(prompt, 6 * factor if call["of"] == grown else 6, **facts)
        found.append(session.trained())
    assert found[0] == found[1]


def test_a_title_asked_for_beside_the_first_call_is_still_a_side_call() -> None:
    session = Session()
    session.call(SYSTEM + session.ids(20), 20, started_s=0.0, finished_s=2.0)
    session.call(SYSTEM + OTHER, 9, tools=(), system="title", started_s=1.0, finished_s=3.0)
    assert session.built().report.branch_reasons == {"parallel_calls": 1}
    assert session.trained() == session.trained("main") == {"t0"}


def test_a_tag_takes_a_judge_out_and_names_who_trains() -> None:
    session = Session()
    said = session.call(SYSTEM + session.ids(20), 20, tag="solver")
    session.call(said + session.ids(5), 20)
    session.call(OTHER, 10, tag="judge")
    assert session.trained() == {"t1"}  # what carries a tag is nobody's but the rule's that names it
    assert session.built().report.side_calls == {"tagged": 30}
    assert session.trained("solver") == {"t0"}
    assert session.trained("solver,judge") == {"t0", "t2"}
    assert session.built("judge").report.side_calls == {"other_tag": 40}
    assert session.trained("critic") == set()


@pytest.mark.parametrize("rule", ["", "two words", "a,", "task,main", "x" * 65])
def test_a_rule_is_one_of_three_words_or_tags(rule: str) -> None:
    with pytest.raises(ConfigError):
        build_trajectory("s", [], train=rule)


def compacted(*, prompt_of_its_own: bool = False) -> Session:
    """Two turns, three summaries of one prompt, and a conversation that goes on from the third in the words of its user."""
    session = Session()
    task = session.ids(30)
    said = session.call(SYSTEM + task, 10, parse_status="parsed")
    said = session.call(said + session.ids(40), 10, parse_status="parsed")
    request = said + session.ids(26)
    more: dict[str, Any] = {}
    if prompt_of_its_own:
        request, more = OTHER + said[4:], {"tools": (), "system": "summaries"}
    for attempt in range(3):
        summary = session.ids(24)
        session.call(request, summary, feeds={"t5": "quoted"} if attempt == 2 else {}, **more)
    said = session.call(SYSTEM + session.ids(3) + summary[4:-1] + session.ids(3), 10, parse_status="parsed")
    session.call(said + session.ids(5), 10)
    return session


@pytest.mark.parametrize("prompt_of_its_own", [False, True])
def test_an_accepted_summary_trains_with_what_follows_it_and_others_are_shown(prompt_of_its_own: bool) -> None:
    session = compacted(prompt_of_its_own=prompt_of_its_own)
    for rule in ("task", "main"):
        assert session.trained(rule) == {"t0", "t1", "t4", "t5", "t6"}
        assert session.built(rule).report.side_calls == {"thrown_away": 48}
    assert len(session.trained("all")) == 7
    found = session.built()
    assert found.report.branch_reasons["compaction"] == 1
    (after,) = (s for s in found.sequences if s.branch_reason == "compaction")
    assert after.turn_ids == ["t5", "t6"]
    if not prompt_of_its_own:  # the accepted one has the turns before it, not the first attempt
        assert found.sequences[0].turn_ids == ["t0", "t1", "t4"]
        assert found.sequences[0].context_turn_ids == []


@pytest.mark.parametrize("changes", [{"feeds": {}}, {"system": None}, {"parse_status": "parsed"}])
def test_what_follows_a_summary_without_a_flow_a_system_message_or_plain_text_is_no_compaction(
    changes: dict[str, Any],
) -> None:
    session = compacted()
    session.turns = [replace(turn, **changes) for turn in session.turns]
    assert "compaction" not in session.built().report.branch_reasons


@pytest.mark.parametrize(
    ("words", "summary"), [(slice(-24, -10), False), (slice(-24, -11), True), (slice(-23, -10), True)]
)
def test_a_prompt_that_has_the_request_for_a_summary_is_not_what_follows_it(words: slice, summary: bool) -> None:
    session = compacted()
    *earlier, request, after, _ = session.turns
    prompt = [*after.prompt_ids, *request.prompt_ids[words]]
    session.turns = [*earlier, request, replace(after, prompt_ids=prompt)]
    assert ("compaction" in session.built().report.branch_reasons) is summary


def test_a_summary_that_is_continued_or_lost_and_the_next_prompt_of_a_summarizer_are_no_compactions() -> None:
    session = compacted()
    accepted = session.turns[4]
    session.call([*accepted.prompt_ids, *accepted.completion_ids, 5], 5)
    assert "compaction" not in session.built().report.branch_reasons
    session = compacted()
    session.turns[4] = replace(accepted, delivered=False)
    assert "compaction" not in session.built().report.branch_reasons
    session = Session()
    said = session.call(SYSTEM + session.ids(60), 24, feeds={"t1": "quoted"})
    session.call(SYSTEM + session.ids(3) + said[64:-1], 10)
    assert session.built().report.branch_reasons == {"sub_agent": 1}


def test_a_history_that_was_cut_and_a_sub_agents_task_are_no_compactions() -> None:
    session = Session()
    said = session.call(SYSTEM + session.ids(60), 30, feeds={"t1": "continued"})
    session.call(SYSTEM + said[34:] + session.ids(20), 10)  # the oldest messages dropped: answer and question are there
    assert "compaction" not in session.built().report.branch_reasons
    session = Session()
    said = session.call(SYSTEM + session.ids(60), 30, parse_status="parsed", feeds={"t1": "called"})
    session.call(SYSTEM + said[66:90] + session.ids(9), 10)  # what the call asks of a copy of the agent
    session.call(said + session.ids(9), 10)
    assert session.built().report.branch_reasons == {"sub_agent": 1}


def test_tokens_sampled_otherwise_are_counted_by_how() -> None:
    session = Session()
    said = session.call(SYSTEM + session.ids(20), 20, sampling={"temperature": 1.0, "top_p": 1})
    said = session.call([*said, 5], 10, sampling={"temperature": 1, "top_p": 0.8})
    said = session.call([*said, 5], 5, sampling={"temperature": 0.6, "top_k": 20, "min_p": 0})
    session.call(OTHER, 30, tools=(), sampling={"temperature": 0})
    assert session.built().report.other_sampling == {"top_p 0.8": 10, "temperature 0.6, top_k 20": 5}
    assert session.built().report.trained_tokens == 30
    cool = build_trajectory("s", session.turns, temperature=0.6).report.other_sampling
    assert cool == {"temperature 1": 20, "temperature 1, top_p 0.8": 10, "top_k 20": 5}


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"])
def test_tokens_sampled_with_a_penalty_or_a_bias_are_counted_and_not_trained(name: str) -> None:
    value, neutral = ({"5": 2.0}, {}) if name == "logit_bias" else (0.5, 1 if name == "repetition_penalty" else 0)
    session = Session()
    said = session.call(SYSTEM + session.ids(20), 20, sampling={name: neutral})
    session.call([*said, 5], 10, sampling={name: value})
    report = session.built().report
    assert report.other_sampling == {name if name == "logit_bias" else f"{name} 0.5": 10}
    assert (report.sampled_tokens, report.trained_tokens, report.side_calls) == (30, 20, {})


@pytest.mark.parametrize(
    ("name", "neutral"),
    [
        *[("presence_penalty", 0), ("frequency_penalty", 0.0), ("repetition_penalty", 1), ("logit_bias", {})],
        *[("top_p", 1.0), ("top_k", -1), ("top_k", 0), ("min_p", 0), ("temperature", 1)],
    ],
)
def test_a_sampling_parameter_at_its_neutral_value_is_none(name: str, neutral: Any) -> None:
    about: Any = {"turn_id": "t", "index": 0, "prompt_ids": [1], "finish_reason": "stop"}
    one = Turn(**about, completion_ids=[2], logprobs=[-0.5], sampling={name: neutral})
    assert one.sampled_otherwise(1.0) is None
