"""The server over HTTP: token ids in, token ids and logprobs out, weights in."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from agentcore_rl_toolkit.errors import PolicyError
from agentcore_rl_toolkit.policy.batch import Generation
from agentcore_rl_toolkit.policy.engine import Engine
from agentcore_rl_toolkit.policy.sampling import SamplingParams
from agentcore_rl_toolkit.policy.server.app import Completions, _read, _Sampling, create_app
from serving import OURS, START_S, hosted, wait_for


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of one server for all tests, in a thread of this process."""
    torch.set_num_threads(1)
    with Engine.from_directory(seed=7) as engine, hosted(create_app(engine, admin_key="key")) as url:
        yield url


def post(server: str, path: str, body: Any) -> httpx.Response:
    return httpx.post(server + path, json=body, timeout=30, headers={"authorization": "Bearer key"})


def sampled(server: str, ids: list[int], **params: Any) -> list[dict[str, Any]]:
    body = {"token_ids": ids, "sampling_params": {"max_tokens": 30, **params}}
    return list(post(server, "/inference/v1/generate", body).raise_for_status().json()["choices"])


def streamed(server: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = [line for line in post(server, "/v1/completions", {**body, "stream": True}).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]


def test_logprobs_over_http_equal_a_full_forward(server: str, hf: tuple[Any, Any], prompts: list[list[int]]) -> None:
    worst = 0.0
    for choice in sampled(server, prompts[0], n=3):
        ids = prompts[0] + choice["token_ids"]
        with torch.no_grad():
            full = torch.log_softmax(hf[0](input_ids=torch.tensor([ids])).logits[0], -1)
        for k, logprob in enumerate(choice["logprobs"]["token_logprobs"], len(prompts[0])):
            worst = max(worst, abs(logprob - full[k - 1, ids[k]].item()))
    assert worst < 1e-4


def test_a_stream_holds_the_same_as_the_whole_reply(server: str, prompts: list[list[int]]) -> None:
    for seed in range(3):
        (whole,) = sampled(server, prompts[seed], seed=seed)
        parts = streamed(server, {"prompt": prompts[seed], "max_tokens": 30, "seed": seed})
        assert [i for part in parts for i in part["token_ids"]] == whole["token_ids"]
        logprobs = [lp for part in parts for lp in part["logprobs"]["token_logprobs"]]
        assert logprobs == pytest.approx(whole["logprobs"]["token_logprobs"], abs=1e-5)
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == [whole["finish_reason"]]
        assert parts[-1]["weight_version_first"] == parts[-1]["weight_version_last"] == whole["weight_version_last"]


def test_a_stream_loses_no_token_that_comes_while_a_chunk_is_made() -> None:
    """The thread of the engine adds tokens at any moment: here, each time that the server reads how many there are."""

    class Growing(list[float]):
        def __len__(self) -> int:
            length = super().__len__()
            generation.token_ids.append(length)
            self.append(-1.0)
            return length

    generation = Generation(prompt_ids=[1], params=SamplingParams())
    generation.logprobs = Growing()
    reply = _Sampling(None, [generation], asyncio.Event(), stream=True)  # type: ignore[arg-type]
    sent = [i for _ in range(5) for chunk in reply._chunks() for i in chunk["choices"][0]["token_ids"]]
    assert sent == list(range(len(sent)))
    assert sent


def test_stop_strings_end_a_completion_and_penalties_have_no_effect(server: str, hf: tuple[Any, Any]) -> None:
    (free,) = sampled(server, [5, 6], temperature=0, max_tokens=6, ignore_eos=True)
    stop = hf[1].decode(free["token_ids"][:2])
    (stopped,) = sampled(server, [5, 6], temperature=0, max_tokens=6, ignore_eos=True, stop=[stop], presence_penalty=2)
    assert (stopped["token_ids"], stopped["finish_reason"]) == (free["token_ids"][:2], "stop")
    assert stopped["stop_reason"] == stop


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[" * 100_000,
        b'{"prompt": "Tom", "token_ids": "Tom"}',
        b'{"prompt": [99999], "token_ids": [99999]}',
        b'{"prompt": [], "token_ids": []}',
        *(
            b'{"prompt": [1], "max_tokens": %s, "token_ids": [1], "sampling_params": {"max_tokens": %s}}' % (n, n)
            for n in (b"0", b"1e999", b"NaN", b'"1"')
        ),
        b'{"prompt": [1], "temperature": -1, "token_ids": [1], "sampling_params": {"temperature": -1}}',
    ],
)
def test_bodies_that_no_engine_could_take_are_400(server: str, body: bytes) -> None:
    for path in ("/v1/completions", "/inference/v1/generate"):
        reply = httpx.post(server + path, content=body, timeout=30)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("temperature", [0], [-0.1]),
        ("top_p", [0.01, 1], [0, 1.01]),
        ("top_k", [-1, 2**31 - 1], [-2, 2**31]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("max_tokens", [1], [0]),
        ("stop", [["a"], []], [[""]]),
        ("seed", [-(2**63), 2**63 - 1], [-(2**63) - 1, 2**63]),
        ("prompt_logprobs", [0, None], [-1, 1]),
        ("n", [1, 64], [0, 65]),
    ],
)
def test_the_bounds_of_sampling_parameters_are_vllms(name: str, accepted: list[Any], refused: list[Any]) -> None:
    for value in accepted:
        _read(json.dumps({name: value}).encode(), Completions)
    for value in refused:
        with pytest.raises(PolicyError, match=rf"\$\.{name}"):
            _read(json.dumps({name: value}).encode(), Completions)


def test_weights_are_replaced_and_a_reply_that_spans_two_versions_names_both(
    server: str, hf: tuple[Any, Any], prompts: list[list[int]], tmp_path: Path
) -> None:
    original = {name: t for name, t in hf[0].state_dict().items() if name != "lm_head.weight"}
    save_file({name: tensor * 1.05 for name, tensor in original.items()}, tmp_path / "new.safetensors")
    save_file(original, tmp_path / "old.safetensors")
    save_file({**original, "model.norm.weight": torch.full((96,), float("nan"))}, tmp_path / "nan.safetensors")

    def load(name: str, version: int) -> httpx.Response:
        return post(server, "/update_weights", {"path": str(tmp_path / name), "version": version})

    (before,) = sampled(server, prompts[0], temperature=0)
    asked = {"prompt": prompts[0], "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server + "/v1/completions", json=asked, timeout=30) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: {"))
        next(lines)
        assert load("new.safetensors", 11).json()["weight_version"] == 11
        (last,) = json.loads(list(lines)[-1].removeprefix("data: "))["choices"]
    assert (last["weight_version_first"], last["weight_version_last"]) == (0, 11)
    (after,) = sampled(server, prompts[0], temperature=0)
    assert after["logprobs"] != before["logprobs"]
    for name in ("nan.safetensors", "nowhere"):
        assert load(name, 12).status_code == 400
    assert httpx.get(server + "/health").json() == {"status": "ok", "weight_version": 11, "dtype": "float32"}
    load("old.safetensors", 0)  # as other tests know them
    (restored,) = sampled(server, prompts[0], temperature=0)
    assert (restored["token_ids"], restored["weight_version_last"]) == (before["token_ids"], 0)
    logprobs = [reply["logprobs"]["token_logprobs"] for reply in (restored, before)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-5), "another batch rounds otherwise"
    refused = httpx.post(server + "/update_weights", json={"path": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


def test_a_client_that_hangs_up_frees_its_place(server: str) -> None:
    """The batch has 64 places: were they still taken, the last request would wait for thousands of tokens."""
    host, port = server.removeprefix("http://").split(":")
    asked = json.dumps({"prompt": [5], "n": 64, "max_tokens": 900, "ignore_eos": True}).encode()
    for _ in range(8):
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(asked)}\r\n\r\n"
            connection.sendall(head.encode() + asked)
    assert len(sampled(server, [5], max_tokens=3)) == 1


@pytest.mark.system
def test_the_server_does_not_outlive_its_parent(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as parent:
        ready = tmp_path / "ready.json"
        words = ["policy", "serve", "--ready-file", str(ready), "--parent-pid", str(parent.pid)]
        with subprocess.Popen([*OURS, *words]) as process:
            wait_for(ready.exists, within_s=START_S, process=process)
            assert json.loads(ready.read_text())["pid"] == process.pid != os.getpid()
            parent.kill()
            parent.wait()
            assert process.wait(timeout=60) == 0
