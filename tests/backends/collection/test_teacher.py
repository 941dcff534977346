"""A teacher over HTTP: the policy server's logprobs of given ids, other vocabularies, and teachers that fail."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import uvicorn
from tokenizers import Tokenizer

from agentcore_rl_toolkit.backends import chat
from agentcore_rl_toolkit.backends.collection.collect import collect
from agentcore_rl_toolkit.backends.collection.credit import Credit
from agentcore_rl_toolkit.backends.collection.samples import to_samples
from agentcore_rl_toolkit.backends.collection.settings import CollectConfig
from agentcore_rl_toolkit.backends.collection.teacher import Teacher
from agentcore_rl_toolkit.errors import ConfigError
from agentcore_rl_toolkit.policy import WEIGHTS_DIR, Engine, create_app, load_policy
from agentcore_rl_toolkit.policy.loading import load_decoder

from ..recorded import Replay, recorded_episodes, requests_for

EPISODES = [
    dataclasses.replace(e, input_id="case") for e in recorded_episodes(32) if e.kind in ("multi_turn", "rewritten")
]


@contextlib.contextmanager
def serving(engine: Engine) -> Iterator[str]:
    torch.set_num_threads(1)
    with engine:
        server = uvicorn.Server(uvicorn.Config(create_app(engine), port=0, log_level="warning"))
        thread = Thread(target=server.run)
        thread.start()
        give_up = time.monotonic() + 60
        while not server.started and time.monotonic() < give_up:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The shipped policy as a teacher."""
    with serving(Engine.from_directory(max_batch=8)) as where:
        yield where


@contextlib.contextmanager
def answering(status: int, body: Any) -> Iterator[tuple[str, list[str]]]:
    """A server of something else, and the paths that it was asked for. ``body`` may be a function of the request."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, {"data": [{"id": "other"}]})

        def do_POST(self) -> None:
            asked.append(self.path)
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.answer(status, body(request) if callable(body) else body)

        def answer(self, code: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def test_a_teachers_logprobs_of_the_students_ids_become_the_advantages(url: str) -> None:
    # The teacher is the signal, so the agent needs no reward.
    episodes = [dataclasses.replace(e, record={"status_code": 200}) for e in EPISODES[:2]]
    replay = Replay(episodes)
    config = CollectConfig(teacher_url=url, require_reward=False)
    groups = collect(requests_for(episodes), client=replay.client, gateway=replay.gateway, config=config)
    samples = to_samples(groups, credit=Credit(teacher_url=url))
    assert {s.sequences for s in samples} > {1}, "branches, too"
    model, _ = load_policy()
    for sample in samples:
        ids = torch.tensor(sample.token_ids)
        with torch.no_grad():
            logprobs_T = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float(), -1)
        its_R = logprobs_T.gather(1, ids[1:, None])[len(sample.prompt_ids) - 1 :, 0].tolist()
        each = zip(its_R, sample.response_logprobs, strict=True)
        wanted = [0.0 if own is None else its - own for its, own in each]
        assert sample.advantages == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("logprob", "advantage"), [(-9999.0, -20.0), (float("-inf"), -20.0), (float("nan"), None)], ids=str
)
def test_a_token_that_the_teacher_never_samples_has_a_bounded_advantage(
    logprob: float, advantage: float | None
) -> None:
    def body(request: dict[str, Any]) -> dict[str, Any]:
        each = [{str(token): {"logprob": logprob, "decoded_token": "?"}} for token in request["prompt"][1:]]
        return {"choices": [{"prompt_logprobs": [None, *each]}]}

    episodes = EPISODES[:1]
    replay = Replay(episodes)
    with answering(200, body) as (where, _):
        config = CollectConfig(teacher_url=where)
        groups = collect(requests_for(episodes), client=replay.client, gateway=replay.gateway, config=config)
    samples = to_samples(groups, credit=Credit(teacher_url=where))
    assert [r.mask_reason for r in groups[0].rollouts] == [None if advantage else "teacher"]
    found = {A for s in samples for A, m in zip(s.advantages, s.response_mask, strict=True) if m}
    assert found == ({advantage} if advantage else set())


def test_the_same_vocabulary_is_accepted_and_another_refused_with_the_token(url: str) -> None:
    Teacher(url).check(WEIGHTS_DIR)
    made = json.loads((WEIGHTS_DIR / "tokenizer.json").read_text())
    names = {token["id"]: token for token in made["added_tokens"]}
    first, second = sorted(names)[:2]
    names[first]["content"], names[second]["content"] = names[second]["content"], names[first]["content"]
    vocabulary = made["model"]["vocab"]
    for token in (names[first], names[second]):
        vocabulary[token["content"]] = token["id"]
    refused = pytest.raises(ConfigError, match=rf"another vocabulary: token {first} is .* need one tokenizer")
    with serving(Engine(load_decoder(rows=2), Tokenizer.from_str(json.dumps(made)))) as other, refused:
        Teacher(other).check(WEIGHTS_DIR)


def test_a_student_with_more_tokens_than_its_teacher_is_refused(url: str, tmp_path: Path) -> None:
    student = Tokenizer.from_file(str(WEIGHTS_DIR / "tokenizer.json"))
    student.add_special_tokens(["<|tool|>"])
    student.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"cannot teach this student: status 400: .*token ids, each from 0 to 575"):
        Teacher(url).check(tmp_path)


def test_a_url_that_refuses_and_a_server_of_something_else_are_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat, "FIRST_PAUSE_S", 0.0)
    with answering(200, {}) as (gone, _):
        pass
    with pytest.raises(ConfigError, match=f"the teacher {gone} cannot teach .*/v1/models: there is no answer"):
        Teacher(gone).check(WEIGHTS_DIR)
    refused = pytest.raises(ConfigError, match=r"no prompt_logprobs .*vLLM or `policy serve`")
    with answering(200, {"choices": [{"text": "hello"}]}) as (where, _), refused:
        Teacher(where).check(WEIGHTS_DIR)
    with pytest.raises(ConfigError, match=r"needs the student's tokenizer.*gateway_model"):
        Teacher(gone).check(None)


def test_a_teacher_that_fails_masks_the_rollout_after_its_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "FIRST_PAUSE_S", 0.0)
    replay = Replay(EPISODES[:2])
    with answering(500, {"error": "out of memory"}) as (where, asked):
        config = CollectConfig(teacher_url=where)
        groups = collect(requests_for(EPISODES[:2]), client=replay.client, gateway=replay.gateway, config=config)
    assert len(asked) == 2 * chat.TRIES
    assert [r.mask_reason for r in groups[0].rollouts] == ["teacher", "teacher"]
    assert all("500" in str(r.error) and "out of memory" in str(r.error) for r in groups[0].rollouts)
    assert to_samples(groups, credit=Credit(teacher_url=where)) == []
