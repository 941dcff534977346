"""Loads a checkpoint's folder into an engine over HTTP: vLLM, SGLang or the built-in policy.

vLLM's routes exist with ``VLLM_SERVER_DEV_MODE=1`` only, and its ``--api-key`` does not guard them: such a server belongs on
loopback.
Sources: vLLM 0.32, `entrypoints/rl/online/api_router.py`, `entrypoints/serve/dev`; SGLang 0.5.23, `entrypoints/http_server.py`,
`managers/io_struct.py`, `managers/tokenizer_manager.py`. SGLang's part was checked against these, not against a server.
"""

from __future__ import annotations

import contextlib
import functools
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .._servers.keys import key_for
from ..errors import ConfigError, WeightsError
from .checkpoint import WEIGHTS_FILE

Kind = Literal["policy", "vllm", "sglang"]
InFlight = Literal["wait", "keep", "abort"]
LOAD_S = 600.0  # reading 60 GB from a network file system
POLICY_KEY = "AGENTCORE_RL_POLICY_ADMIN_KEY"
ASK_S = 300.0  # vLLM's first answer took 104 s on busy cores


@dataclass(frozen=True, kw_only=True)
class EngineAddress:
    """The destination of weights. ``model`` is the name under which the engine serves them, ``key`` the engine's API key."""

    url: str
    engine: Kind = "policy"
    model: str = "policy"
    key: str | None = field(default=None, repr=False)

    def connect(self) -> Engine:
        """Return a client of the engine. Raises: ConfigError."""
        kinds: dict[str, type[Engine]] = {"policy": PolicyServer, "vllm": VLLMServer, "sglang": SGLangServer}
        if self.engine not in kinds:
            raise ConfigError(f"weights can be put into {', '.join(kinds)}, not into {self.engine!r}")
        return kinds[self.engine](self)


class Sampled(NamedTuple):
    """Tokens that an engine sampled, and their logprobs. Shapes: (T,) both."""

    ids: list[int]
    logprobs: list[float]

    @classmethod
    def of(cls, ids: Any, logprobs: Any) -> Sampled:
        """Read both from an engine's JSON."""
        return cls([int(i) for i in ids], [float(v) for v in logprobs])


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Return the certificates that are trusted. Loading them takes 20 ms, and a proof has dozens of requests."""
    import httpx

    return httpx.create_ssl_context(trust_env=False)


class Engine:
    """An engine. All methods raise WeightsError with the engine's message."""

    _about = ""  # the path that tells the version of its weights
    scaled_by = ""  # the setting that makes it report the logprobs of the temperature that it samples at

    def __init__(self, address: EngineAddress) -> None:
        self._at = address

    def _ask(self, path: str, body: Any = None, *, get: bool = False, timeout_s: float = ASK_S) -> Any:
        import httpx

        at, key = self._at, self._key()
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        sent: Any = {} if get else {"json": {} if body is None else body}
        try:
            reply = httpx.request(
                "GET" if get else "POST",
                at.url.rstrip("/") + path,
                headers=headers,
                timeout=timeout_s,
                trust_env=False,
                verify=_trusted(),
                **sent,
            )
        except httpx.HTTPError as e:
            raise WeightsError(f"{at.engine} at {at.url} did not answer {path}: {e}") from e
        if not reply.is_success:
            status = reply.status_code
            raise WeightsError(
                f"{at.engine} at {at.url} refused {path}: {status} {reply.text[:2000]}{self._hint(status)}"
            )
        try:
            return reply.json() if reply.content.strip() else {}
        except ValueError:
            return {}

    def _key(self) -> str | None:
        return self._at.key

    def _hint(self, status: int) -> str:
        return ""

    @contextlib.contextmanager
    def _reading(self, what: str, answer: Any) -> Iterator[None]:
        """Raise WeightsError if the block does not find this in an answer."""
        try:
            yield
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise WeightsError(f"{self._at.engine} at {self._at.url} gave no {what}: {answer}") from e

    def pause(self, in_flight: InFlight) -> None:
        """Stop sampling. ``in_flight`` is what happens to running requests."""

    def load(self, folder: Path, version: int) -> Mapping[str, int] | None:
        """Load the weights, and drop the cache of the old ones.

        Returns the checksums of some tensors as the engine has them now; None if it reports none.
        """
        raise NotImplementedError

    def resume(self) -> None:
        """Sample again."""

    def version(self) -> int | None:
        """Return the version that the engine reports."""
        try:
            return int(self._ask(self._about, get=True).get("weight_version"))
        except (TypeError, ValueError):
            return None

    def dtype(self) -> str | None:
        """Return the type of numbers in which it computes, or None if it does not report it."""
        return None

    def sample(
        self, prompt_ids: list[int], *, n: int, max_tokens: int, seed: int, temperature: float = 1.0
    ) -> list[Sampled]:
        """Sample from the whole distribution of this temperature."""
        body = {
            "model": self._at.model,
            "prompt": prompt_ids,
            "n": n,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": 1.0,  # an engine may have other defaults from the model's generation_config.json
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        answer = self._ask("/v1/completions", body)
        with self._reading("token ids and logprobs", answer):
            return [Sampled.of(c["token_ids"], c["logprobs"]["token_logprobs"]) for c in answer["choices"]]

    def logprobs(self, ids: list[int]) -> list[float]:
        """Return the logprob of each token but the first, at temperature 1. Shapes: (T,) -> (T - 1,)."""
        body = {
            "model": self._at.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        answer = self._ask("/v1/completions", body)
        with self._reading("prompt_logprobs", answer):
            given = answer["choices"][0]["prompt_logprobs"]
            return [float(e[str(token)]["logprob"]) for token, e in zip(ids[1:], given[1:], strict=True)]


class PolicyServer(Engine):
    """The built-in policy: it changes weights between two tokens, with nothing to pause."""

    _about = "/health"

    def _key(self) -> str | None:
        return self._at.key or key_for("policy", self._at.url, POLICY_KEY)

    def load(self, folder: Path, version: int) -> Mapping[str, int] | None:
        body = {"path": str(folder / WEIGHTS_FILE), "version": version}
        found: Mapping[str, int] | None = self._ask("/update_weights", body, timeout_s=LOAD_S).get("checksums")
        return found

    def dtype(self) -> str | None:
        found = self._ask(self._about, get=True).get("dtype")
        return None if found is None else str(found)


class VLLMServer(Engine):
    """vLLM, started with our worker extension (`vllm_worker`)."""

    _about = "/weight_info"
    scaled_by = "start vLLM with --logprobs-mode processed_logprobs"

    def _hint(self, status: int) -> str:
        if status == 404:
            return "; start vLLM with VLLM_SERVER_DEV_MODE=1 on --host 127.0.0.1"
        if status == 500:
            return (
                "; is it started with --worker-extension-cls agentcore_rl_toolkit.weights.vllm_worker.WorkerExtension?"
            )
        return ""

    def pause(self, in_flight: InFlight) -> None:
        self._ask(f"/pause?mode={in_flight}", timeout_s=LOAD_S)

    def resume(self) -> None:
        self._ask("/resume")

    def load(self, folder: Path, version: int) -> None:
        body = {"method": "agentcore_load_weights", "args": [str(folder)]}
        self._ask("/collective_rpc", body, timeout_s=LOAD_S)
        # Blocks of paused requests are held on purpose; blocks that others reuse must be freed.
        self._ask("/reset_prefix_cache")
        self._ask("/update_weight_version", {"new_version": str(version)})

    def dtype(self) -> str | None:
        # `/server_info` has it too, but fails in environments without pip (vLLM 0.32, `collect_env.get_pip_packages`).
        (found, *_) = self._ask("/collective_rpc", {"method": "agentcore_dtype"})["results"]
        return str(found)


class SGLangServer(Engine):
    """SGLang's update from disk."""

    _about = "/model_info"
    scaled_by = "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"

    def pause(self, in_flight: InFlight) -> None:
        # "retract" puts running requests back into the queue. They continue with the new weights and a new cache.
        if in_flight == "wait":
            return  # the update itself waits until nothing runs
        self._ask("/pause_generation", {"mode": "retract" if in_flight == "keep" else "abort"}, timeout_s=LOAD_S)

    def resume(self) -> None:
        self._ask("/continue_generation")

    def load(self, folder: Path, version: int) -> None:
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        answer = self._ask("/update_weights_from_disk", body, timeout_s=LOAD_S)
        if answer.get("success") is False:
            raise WeightsError(f"sglang at {self._at.url} did not load the weights: {answer.get('message') or answer}")

    def sample(
        self, prompt_ids: list[int], *, n: int, max_tokens: int, seed: int, temperature: float = 1.0
    ) -> list[Sampled]:
        sampling = {"max_new_tokens": max_tokens, "temperature": temperature, "n": n}
        sampling |= {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
        body: dict[str, Any] = {"input_ids": prompt_ids, "sampling_params": sampling, "return_logprob": True}
        answer = self._ask("/generate", body)
        with self._reading("token ids and logprobs", answer):
            each = [a["meta_info"]["output_token_logprobs"] for a in (answer if isinstance(answer, list) else [answer])]
            return [Sampled.of([e[1] for e in tokens], [e[0] for e in tokens]) for tokens in each]

    def logprobs(self, ids: list[int]) -> list[float]:
        sampling = {"max_new_tokens": 1, "temperature": 0.0}
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        answer = self._ask("/generate", body)
        with self._reading("input_token_logprobs", answer):
            return [float(entry[0]) for entry in answer["meta_info"]["input_token_logprobs"][1:]]
