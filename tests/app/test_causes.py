"""Whose failure an agent's exception is, by itself and in chains; what the record of one says. Frameworks' exceptions are
real where the project installs them, else classes of the same module and name: names are all that is looked at.
"""

from __future__ import annotations

import asyncio
import email.message
import errno
import http.client
import io
import urllib.error
from collections.abc import Callable
from typing import Any

import aiohttp
import anthropic
import httpx
import httpx2
import openai
import pytest
import requests
from botocore.exceptions import EventStreamError
from google import genai
from google.genai import types as genai_types
from strands.types.exceptions import (
    ContextWindowOverflowException,
    EventLoopException,
    MaxTokensReachedException,
    ModelThrottledException,
    StructuredOutputException,
)

from agentcore_rl_toolkit import AgentCoreRLApp, PolicyFailure
from agentcore_rl_toolkit.app.causes import Blame, blame, elsewhere
from agentcore_rl_toolkit.contract import Cause
from agentcore_rl_toolkit.errors import POLICY_FAILURES, ConfigError, GatewayError, StoreError, UpstreamError
from serving import answering

AGENT, INFRASTRUCTURE = Blame(cause=Cause.AGENT), Blame(cause=Cause.INFRASTRUCTURE)


def failed_at(failure: str) -> Blame:
    return Blame(cause=Cause.POLICY, failure=failure)


def named(module: str, name: str, *bases: type[BaseException]) -> BaseException:
    """An exception of a framework that is not installed here."""
    return type(name, bases or (Exception,), {"__module__": module})("boom")


def subclass_of_unexpected(name: str) -> BaseException:
    """An exception of pydantic-ai that inherits from a broader one of the table."""
    broader = type("UnexpectedModelBehavior", (Exception,), {"__module__": "pydantic_ai.exceptions"})
    return type(name, (broader,), {"__module__": "pydantic_ai.exceptions"})("boom")


CLIENT = openai.OpenAI(api_key="none", base_url="http://gateway/v1")


def status_error(status: int, body: dict[str, Any] | None = None) -> openai.APIStatusError:
    response = httpx.Response(status, json={"error": body or {}}, request=httpx.Request("POST", "http://gateway/v1"))
    return CLIENT._make_status_error_from_response(response)


def chained(outer: BaseException, inner: BaseException) -> BaseException:
    try:
        try:
            raise inner
        except BaseException as e:
            raise outer from e
    except BaseException as e:
        return e


def in_context(outer: BaseException, inner: BaseException) -> BaseException:
    try:
        try:
            raise inner
        except BaseException:
            raise outer  # noqa: B904  (the chain without a cause is what is tested)
    except BaseException as e:
        return e


def stream_error(code: str) -> EventStreamError:
    return EventStreamError({"Error": {"Code": code, "Message": "out of memory"}}, "ConverseStream")


OVERFLOW = {"message": "This model's maximum context length is 8 tokens", "code": "context_length_exceeded"}
TURNS = {"message": "this session may make 3 model calls, all are used", "code": "turn_limit_reached"}
REQUEST = httpx.Request("POST", "http://gateway/v1")

CASES: list[tuple[str, Callable[[], BaseException], Blame]] = [
    ("our own", lambda: PolicyFailure("turns"), failed_at("turns")),
    ("our own in words", lambda: PolicyFailure("it went round in circles"), failed_at("other")),
    ("our own around a parser's", lambda: chained(PolicyFailure("calls"), ValueError("{")), failed_at("calls")),
    ("strands tokens", lambda: MaxTokensReachedException("cut"), failed_at("tokens")),
    ("strands context", lambda: ContextWindowOverflowException("long"), failed_at("context")),
    ("strands structure", lambda: StructuredOutputException("no"), failed_at("calls")),
    ("strands wrapped", lambda: EventLoopException(MaxTokensReachedException("cut")), failed_at("tokens")),
    (
        "strands context of a client",
        lambda: chained(ContextWindowOverflowException("x"), status_error(400, OVERFLOW)),
        failed_at("context"),
    ),
    ("strands throttled", lambda: ModelThrottledException("wait"), INFRASTRUCTURE),
    (
        "strands throttled over turns",
        lambda: chained(ModelThrottledException("x"), status_error(403, TURNS)),
        failed_at("turns"),
    ),
    (
        "strands over a lost connection",
        lambda: EventLoopException(openai.APIConnectionError(request=REQUEST)),
        INFRASTRUCTURE,
    ),
    (
        "strands tokens after a lost connection",
        lambda: chained(MaxTokensReachedException("x"), openai.APITimeoutError(REQUEST)),
        INFRASTRUCTURE,
    ),
    (
        "strands context of a server that failed",
        lambda: chained(ContextWindowOverflowException("x"), status_error(500, OVERFLOW)),
        INFRASTRUCTURE,
    ),
    ("langgraph turns", lambda: named("langgraph.errors", "GraphRecursionError", RecursionError), failed_at("turns")),
    (
        "langchain turns",
        lambda: named("langchain.agents.middleware.model_call_limit", "ModelCallLimitExceededError"),
        failed_at("turns"),
    ),
    (
        "langchain calls",
        lambda: named("langchain_core.exceptions", "OutputParserException", ValueError),
        failed_at("calls"),
    ),
    ("langchain refused", lambda: named("langchain_core.exceptions", "ModelRateLimitError"), INFRASTRUCTURE),
    ("agents sdk turns", lambda: named("agents.exceptions", "MaxTurnsExceeded"), failed_at("turns")),
    ("agents sdk calls", lambda: named("agents.exceptions", "ModelBehaviorError"), failed_at("calls")),
    (
        "agents sdk over 502",
        lambda: chained(named("agents.exceptions", "ModelBehaviorError"), status_error(502)),
        INFRASTRUCTURE,
    ),
    ("pydantic-ai turns", lambda: named("pydantic_ai.exceptions", "UsageLimitExceeded"), failed_at("turns")),
    ("pydantic-ai retries", lambda: named("pydantic_ai.exceptions", "UnexpectedModelBehavior"), failed_at("calls")),
    ("pydantic-ai cut", lambda: subclass_of_unexpected("IncompleteToolCall"), failed_at("tokens")),
    ("smolagents turns", lambda: named("smolagents.utils", "AgentMaxStepsError"), failed_at("turns")),
    ("smolagents calls", lambda: named("smolagents.utils", "AgentParsingError"), failed_at("calls")),
    ("dspy", lambda: named("dspy.utils.exceptions", "AdapterParseError"), failed_at("calls")),
    ("instructor", lambda: named("instructor.core.exceptions", "InstructorRetryException"), failed_at("calls")),
    ("adk", lambda: named("google.adk.agents.invocation_context", "LlmCallsLimitExceededError"), failed_at("turns")),
    ("mini-swe-agent", lambda: named("minisweagent.agents.default", "LimitsExceeded"), failed_at("turns")),
    ("a class of that name elsewhere", lambda: named("shop.errors", "MaxTurnsExceeded"), AGENT),
    ("openai context", lambda: status_error(400, OVERFLOW), failed_at("context")),
    ("openai turns", lambda: status_error(403, TURNS), failed_at("turns")),
    ("openai wrong request", lambda: status_error(400, {"message": "no messages"}), AGENT),
    ("openai wrong key", lambda: status_error(401), INFRASTRUCTURE),
    ("openai no such model", lambda: status_error(404), INFRASTRUCTURE),
    ("openai stream error", lambda: openai.APIError("broke off", REQUEST, body=None), INFRASTRUCTURE),
    ("openai stream overflow", lambda: openai.APIError("x", REQUEST, body=OVERFLOW), failed_at("context")),
    ("httpx", lambda: httpx.ReadTimeout("slow"), INFRASTRUCTURE),
    ("urllib", lambda: urllib.error.URLError("refused"), INFRASTRUCTURE),
    (
        "urllib 503",
        lambda: urllib.error.HTTPError("http://x", 503, "busy", email.message.Message(), io.BytesIO()),
        INFRASTRUCTURE,
    ),
    (
        "a tool's 404",
        lambda: httpx.HTTPStatusError("none", request=REQUEST, response=httpx.Response(404, request=REQUEST)),
        AGENT,
    ),
    ("a socket", lambda: ConnectionResetError("gone"), INFRASTRUCTURE),
    ("a deadline", lambda: TimeoutError("late"), INFRASTRUCTURE),
    ("a reply that broke off", lambda: http.client.IncompleteRead(b"{"), INFRASTRUCTURE),
    ("a full disk", lambda: OSError(errno.ENOSPC, "No space left on device"), INFRASTRUCTURE),
    ("no route", lambda: OSError(errno.EHOSTUNREACH, "No route to host"), INFRASTRUCTURE),
    ("a missing file", lambda: FileNotFoundError(errno.ENOENT, "No such file"), AGENT),
    ("bedrock stream", lambda: stream_error("modelStreamErrorException"), INFRASTRUCTURE),
    ("bedrock stream throttled", lambda: stream_error("throttlingException"), INFRASTRUCTURE),
    ("bedrock stream refused", lambda: stream_error("validationException"), AGENT),
    ("our gateway's", lambda: UpstreamError("down"), INFRASTRUCTURE),
    ("our store's", lambda: StoreError("full"), INFRASTRUCTURE),
    ("a group", lambda: ExceptionGroup("g", [ValueError("x"), MaxTokensReachedException("cut")]), failed_at("tokens")),
    (
        "a group with the infrastructure",
        lambda: ExceptionGroup("g", [MaxTokensReachedException("x"), GatewayError("y")]),
        INFRASTRUCTURE,
    ),
    (
        "in its context",
        lambda: in_context(RuntimeError("wrapped"), MaxTokensReachedException("cut")),
        failed_at("tokens"),
    ),
    ("in its arguments", lambda: RuntimeError("wrapped", ConnectionResetError("gone")), INFRASTRUCTURE),
    ("code", lambda: KeyError("answer"), AGENT),
    ("code after policy", lambda: chained(ValueError("x"), PolicyFailure("calls")), failed_at("calls")),
    ("exit", lambda: SystemExit(3), AGENT),
    ("cancelled", lambda: asyncio.CancelledError(), AGENT),
]


@pytest.mark.parametrize(("make", "whose"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_an_exception_says_whose_failure_it_is(make: Callable[[], BaseException], whose: Blame) -> None:
    assert blame(make()) == whose


def test_a_stop_reason_shows_if_the_policy_was_cut_short() -> None:
    for stop_reason, failure in (("max_tokens", "tokens"), ("limit_turns", "turns")):
        text = rf"^{POLICY_FAILURES[failure]} \(stop reason '{stop_reason}'\)$"
        with pytest.raises(PolicyFailure, match=text) as cut:
            PolicyFailure.check_stop(stop_reason)
        assert cut.value.reason == failure
    for stop_reason in ("end_turn", "", None):
        PolicyFailure.check_stop(stop_reason)


def caught(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except Exception as e:
        return e
    raise AssertionError("it raised nothing")


def ask_gemini(url: str) -> object:
    with genai.Client(api_key="none", http_options=genai_types.HttpOptions(base_url=url)) as client:
        return client.models.generate_content(model="m", contents="hi")


@pytest.mark.parametrize(
    ("status", "message", "whose"),
    [
        (503, "no server is available", INFRASTRUCTURE),
        (429, "slow down", INFRASTRUCTURE),
        (401, "a wrong key", INFRASTRUCTURE),
        (400, "the prompt is longer than the model's context length", failed_at("context")),
        (400, "no contents", AGENT),
    ],
)
def test_an_error_of_googles_client_has_the_cause_of_its_reply(status: int, message: str, whose: Blame) -> None:
    with answering(lambda _: (status, {"error": {"code": status, "message": message, "status": "X"}})) as url:
        assert blame(caught(lambda: ask_gemini(url))) == whose


async def ask_gemini_async(url: str) -> None:
    async with genai.Client(api_key="none", http_options=genai_types.HttpOptions(base_url=url)).aio as client:
        await client.models.generate_content(model="m", contents="hi")


async def post_with_aiohttp(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        (await session.post(f"{url}/ask")).raise_for_status()


@pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")
@pytest.mark.parametrize(
    "ask",
    [
        ask_gemini,
        lambda url: asyncio.run(ask_gemini_async(url)),
        lambda url: asyncio.run(post_with_aiohttp(url)),
        lambda url: requests.post(f"{url}/ask").raise_for_status(),
    ],
    ids=["google-genai", "google-genai async", "aiohttp", "requests"],
)
def test_an_error_of_another_model_than_the_policy_has_its_address(ask: Callable[[str], object]) -> None:
    overflow = {"error": {"code": 400, "message": "the prompt is longer than the model's context length"}}
    with answering(lambda _: (400, overflow)) as url:
        error = caught(lambda: ask(url))
    assert elsewhere(error, f"{url}/v1") is None
    assert str(elsewhere(error, "http://127.0.0.1:9/v1")).startswith(f"{url}/")


@pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])
@pytest.mark.parametrize(
    ("reply", "whose"),
    [(None, INFRASTRUCTURE), ((503, b""), INFRASTRUCTURE), ((404, b""), AGENT)],
    ids=["hangs up", "503", "404"],
)
def test_clients_of_both_httpx_are_known(library: Any, reply: tuple[int, bytes] | None, whose: Blame) -> None:
    with answering(lambda _: reply) as url:
        assert blame(caught(lambda: library.post(url).raise_for_status())) == whose


def test_a_stream_of_anthropics_client_that_breaks_off_is_the_infrastructures() -> None:
    def ask(url: str) -> None:
        client = anthropic.Anthropic(api_key="none", base_url=url, max_retries=0)
        messages: Any = [{"role": "user", "content": "hi"}]
        with client.messages.stream(model="m", max_tokens=9, messages=messages) as stream:
            stream.until_done()

    headers = {"content-type": "text/event-stream", "content-length": "999", "connection": "close"}
    with answering(lambda _: (200, b": ping\n\n", headers)) as url:
        assert blame(caught(lambda: ask(url))) == INFRASTRUCTURE


def test_an_agent_names_its_own_exceptions_of_a_policy_that_failed() -> None:
    class OutOfMoves(Exception):
        pass

    found = failed_at("other")
    assert blame(OutOfMoves(), (OutOfMoves,)) == found
    assert blame(chained(KeyError("x"), OutOfMoves()), (OutOfMoves,)) == found
    assert blame(OutOfMoves()) == AGENT
    for wrong in ("OutOfMoves", OutOfMoves(), (OutOfMoves, int)):
        with pytest.raises(ConfigError, match="policy_failures"):
            AgentCoreRLApp().rollout_entrypoint(policy_failures=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("reward", [True, "0", float("nan"), float("inf"), {"format": 1.0}, {"reward": "x"}, [1.0]])
def test_a_reward_that_is_none_is_refused_when_the_agent_is_written(reward: Any) -> None:
    with pytest.raises(ConfigError, match="on_policy_failure"):
        AgentCoreRLApp().rollout_entrypoint(on_policy_failure=reward)


AGENT_FILE = """
# Strands takes a second to import, and only the name counts
MaxTokensReachedException = type("MaxTokensReachedException", (Exception,), {{"__module__": "strands.types.exceptions"}})

@app.rollout_entrypoint{declared}
def run(payload):
    match payload["do"]:
        case "ramble":
            raise MaxTokensReachedException("cut")
        case "lose":
            raise ConnectionRefusedError("no gateway")
        case "break":
            raise KeyError("answer")
        case "ask":
            import httpx
            httpx.post(payload["url"] + "/judge?key=secret").raise_for_status()
        case "crash":
            raise RuntimeError("a fault of the agent")
        case "stop":
            raise LookupError("no move is left")
    return {{"rewards": 1.0}}
"""


@pytest.fixture(scope="module")
def agent(start_shared_agent: Any) -> Any:
    return start_shared_agent(AGENT_FILE.format(declared=""))


@pytest.fixture(scope="module")
def declaring_agent(start_shared_agent: Any) -> Any:
    return start_shared_agent(
        AGENT_FILE.format(
            declared='(on_policy_failure={"reward": -0.5, "format": 0.0}, policy_failures=(LookupError,), train="main")'
        )
    )


def test_the_agent_declares_what_the_policys_failures_score(declaring_agent: Any) -> None:
    assert declaring_agent.run({"do": "ramble"})["rewards"] == {"reward": -0.5, "format": 0.0}
    # The gateway may know that the policy failed where the exception shows only that the agent's code did.
    blocks = {do: declaring_agent.run({"do": do})["_agent"] for do in ("ramble", "crash", "lose")}
    assert {do: block.get("policy_reward") for do, block in blocks.items()} == {
        "ramble": None,
        "crash": {"reward": -0.5, "format": 0.0},
        "lose": None,
    }
    stopped = declaring_agent.run({"do": "stop"})
    assert (stopped["_agent"]["cause"], stopped["_agent"]["failure"]) == ("policy", "other")


def test_a_call_of_another_model_than_the_policy_is_the_infrastructures_and_has_its_address(agent: Any) -> None:
    with answering(lambda _: (400, b"context_length_exceeded")) as url:
        ask = {"do": "ask", "url": url}
        policy, judge = (agent.run(ask, base_url=f"{base_url}/v1") for base_url in (url, "http://127.0.0.1:9"))
        away = agent.run({"do": "ask", "url": "http://127.0.0.1:9"}, base_url=url)
    assert (policy["_agent"]["cause"], policy["_agent"].get("failure")) == ("policy", "context")
    assert "model's gateway" not in policy["stop_reason"] + policy["traceback"]
    for record, address in ((judge, url), (away, "http://127.0.0.1:9")):
        assert (record["_agent"]["cause"], record["outcome"]) == ("infrastructure", "lost")
        assert record["stop_reason"].startswith(f"{address}/judge (not the model's gateway): ")
        assert f"The call went to {address}/judge, which is not the model's gateway." in record["traceback"]


def test_a_record_says_what_the_agent_wants_trained_and_the_client_wins(declaring_agent: Any) -> None:
    assert declaring_agent.run({"do": "go well"})["_agent"]["train"] == "main"
    assert declaring_agent.run({"do": "break"}, train="all")["_agent"]["train"] == "all"
    with pytest.raises(ConfigError, match="tag"):
        AgentCoreRLApp().rollout_entrypoint(train="two words")
