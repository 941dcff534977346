"""The common part of all proofs: an agent in its own environment, with a scripted model.

`Proof` starts a local AgentCore Runtime, an object store, the gateway, and a model whose replies come from a Python function.
It deploys the example's `rl_app.py` and runs payloads, each in a session, as trainers do. Examples of such functions are an
oracle, a solver that does nothing, and a wrong solver::

    with Proof(example=Path(__file__).parent, framework="Strands Agents") as proof:
        results = proof.run(payloads, oracle)
        proof.row(rollouts=len(results), oracle_reward=mean(results), tool_calls=tool_calls(results))
        proof.check("the oracle solves every task", value=mean(results), target=1.0, ok=mean(results) == 1.0)

The end of the block stops everything, prints the table and the checks, writes ``--json FILE``, and ends the process with code 1
if a check failed. With ``--quick`` (`Proof.quick`), a proof runs fewer tasks. With ``--here``, the agent runs in the current
environment, if it has the packages.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from agentcore_rl_toolkit import RolloutClient
from agentcore_rl_toolkit.backends import (
    CollectConfig,
    CollectedRollout,
    GroupRequest,
    collect_async,
)
from agentcore_rl_toolkit.cli.output.terminal import visible
from agentcore_rl_toolkit.cli.servers.vllm import MODEL_ID
from agentcore_rl_toolkit.cli.training.services import Services
from agentcore_rl_toolkit.cli.training.stack import QUIET, Stack, Upstream, start, use_local_credentials
from agentcore_rl_toolkit.errors import AgentCoreRLError
from agentcore_rl_toolkit.gateway import GatewayClient
from agentcore_rl_toolkit.gateway.config import ADMIN_KEY_ENV
from agentcore_rl_toolkit.gateway.testing import ScriptedModel
from agentcore_rl_toolkit.gateway.testing.model import Decide
from agentcore_rl_toolkit.runtime.remote import RuntimeView

COLUMNS = (
    "example",
    "framework",
    "rollouts",
    "oracle_reward",
    "noop_reward",
    "policy_before",
    "policy_after",
    "tool_calls",
    "seconds",
    "note",
)
END_TRAINING_S = 30.0  # the time in which the services of a training stop in order after SIGTERM
LOG_TAIL = 2000  # characters of a session's log that are kept of a rollout that failed


def parser(description: str | None = None) -> argparse.ArgumentParser:
    """Make a parser with the options of all proofs. A proof adds more, and passes the parsed options to `Proof`."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="run fewer tasks")
    made.add_argument("--json", type=Path, metavar="FILE", help="write rows and checks to this file")
    made.add_argument("--here", action="store_true", help="use the current environment, if it has the packages")
    return made


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished rollout.

    ``reward`` is None if the record has none. ``result`` is the complete record. ``tool_calls`` is the number of tool calls of
    the model, and ``turns`` the number of recorded model calls. ``log`` is the end of the session's output, if the rollout did
    not end `ok`. ``cause`` is the cause of a failure (agent, policy or infrastructure), and ``failure`` the kind of the
    policy's failure, which has the reward that the agent declares.
    """

    payload: Mapping[str, Any]
    outcome: str
    reward: float | None
    result: Mapping[str, Any]
    tool_calls: int
    turns: int
    error: str | None
    traceback: str | None = field(repr=False)
    dialogue: Sequence[Mapping[str, Any]] = field(repr=False)
    elapsed_s: float | None = None
    log: str = field(default="", repr=False)
    cause: str | None = None
    failure: str | None = None


class Proof:
    """The running services of one example. Use it as a context manager in a separate program: its end may end the process.

    ``options`` are the parsed options of `parser`. ``app`` is the agent's file in ``example``. ``session_env`` are variables of
    all sessions, and ``runtime_options`` more options of `agentcore-rl runtime serve`. ``max_concurrent`` limits the sessions at
    the same time, and ``rollout_timeout_s`` a rollout, in seconds.
    """

    def __init__(
        self,
        *,
        example: Path,
        framework: str | None,
        options: argparse.Namespace | None = None,
        app: str = "rl_app.py",
        session_env: Mapping[str, str] | None = None,
        runtime_options: Sequence[str] = (),
        max_concurrent: int = 8,
        rollout_timeout_s: float = 180.0,
    ) -> None:
        self.example = example.resolve()
        self.framework = framework
        self.options = options if options is not None else parser().parse_args()
        self.quick: bool = self.options.quick
        self.rows: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self.model = ScriptedModel()
        self.stack: Stack | None = None
        self._agent = self.example / app
        self._session_env = dict(session_env or {})
        self._runtime_options = tuple(runtime_options)
        self._max_concurrent = max_concurrent
        self._rollout_timeout_s = rollout_timeout_s
        self._exits = contextlib.ExitStack()
        self._services: Services | None = None
        self._runs = 0
        self._began_s = time.monotonic()

    # -- the stack

    def __enter__(self) -> Proof:
        end_in_order_on_sigterm()
        use_local_credentials()
        scratch = tempfile.TemporaryDirectory(prefix="agentcore-rl-proof-", ignore_cleanup_errors=True)
        try:
            self.folder = Path(self._exits.enter_context(scratch))
            self._exits.enter_context(self.model)
            key = secrets.token_urlsafe(24)
            environment = {**QUIET, ADMIN_KEY_ENV: key}
            self._services = self._exits.enter_context(Services(self.folder / "logs", env=environment))
            pairs = [f"{name}={value}" for name, value in self._session_env.items()]
            self.stack = start(
                self._services,
                self._agent,
                folder=self.folder,
                model=None,
                admin_key=key,
                upstream=Upstream(url=self.model.url, engine="vllm", relayed=True),
                own_environment=not self.options.here,
                runtime_options=[*(f"--session-env={pair}" for pair in pairs), *self._runtime_options],
            )
        except BaseException as e:
            self._exits.close()
            if isinstance(e, AgentCoreRLError):
                self._broken(str(e))
            raise
        self._ready_s = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._exits.close()
        if error is not None:
            self._failed(error)
            self._write()
            return
        if not self.checks:
            self.check("the proof checks something", value=0, target="1 or more", ok=False)
        self._write()
        print(table(self.rows), "", checks_text(self.checks), sep="\n")
        if not all(check["ok"] for check in self.checks):
            sys.exit(1)

    # -- rollouts

    def run(
        self, payloads: Sequence[Mapping[str, Any]], decide: Decide, *, rollout_timeout_s: float | None = None
    ) -> list[Result]:
        """Run one rollout of each payload with this solver. Return the results in the order of the payloads.

        A rollout that fails is a result with its outcome and error. Raises: the first exception of ``decide``; ServiceError
        when a part of the stack died.
        """
        self.model.decide = decide
        self.model.errors.clear()
        self._runs += 1
        assert self._services is not None
        with self._services.watched():
            collected = asyncio.run(self._collect(payloads, rollout_timeout_s or self._rollout_timeout_s))
        if self.model.errors:
            raise self.model.errors[0]
        return [self._result(payload, rollout) for payload, rollout in zip(payloads, collected, strict=True)]

    async def _collect(self, payloads: Sequence[Mapping[str, Any]], timeout_s: float) -> list[CollectedRollout]:
        assert self.stack is not None
        stack = self.stack
        requests = [GroupRequest(input_id=f"{i:06d}", payload=payload) for i, payload in enumerate(payloads)]
        config = CollectConfig(
            max_concurrent=self._max_concurrent,
            rollout_timeout_s=timeout_s,
            submit_timeout_s=timeout_s,
            require_reward=False,
        )
        with (
            RolloutClient(
                stack.agent_arn,
                stack.store,
                f"proof-{self._runs}",
                model_id=MODEL_ID,
                endpoint_url=stack.runtime_url,
                tps_limit=1000,
            ) as client,
            GatewayClient(stack.gateway_url, admin_key=stack.gateway_admin_key) as gateway,
        ):
            groups = await collect_async(requests, client=client, gateway=gateway, config=config)
        return [group.rollouts[0] for group in groups]

    def _result(self, payload: Mapping[str, Any], rollout: CollectedRollout) -> Result:
        outcome = str(rollout.outcome)
        capture = rollout.capture
        return Result(
            payload=payload,
            outcome=outcome,
            reward=rollout.reward,
            result=rollout.record or {},
            tool_calls=sum(_calls_in(c.message) for r in capture.records for c in r.choices) if capture else 0,
            turns=len(capture.turns) if capture else 0,
            error=rollout.reason,
            traceback=rollout.traceback,
            dialogue=capture.dialogue if capture else [],
            elapsed_s=rollout.elapsed_s,
            log="" if outcome == "ok" else self._log_of(rollout.session_id),
            cause=None if rollout.cause is None else str(rollout.cause),
            failure=rollout.failure,
        )

    def _log_of(self, session_id: str) -> str:
        assert self.stack is not None
        try:
            return "".join(RuntimeView(self.stack.runtime_url).log(session_id))[-LOG_TAIL:]
        except AgentCoreRLError:
            return ""

    # -- training

    def train(self, command: Sequence[str], run: Path, *, note: str, must_gain: bool) -> None:
        """Run a training that leaves its run in the folder ``run``, and add its row and checks.

        ``must_gain``: the held-out reward has to be higher after than before; for trainings whose gain is far above chance.
        Raises: RuntimeError when the command fails.
        """
        began_s = time.monotonic()
        _run_to_its_end(command)
        summary = json.loads((run / "summary.json").read_text())
        before, after = summary["held_out_reward_before"], summary["held_out_reward_after"]
        self.row(
            rollouts=summary["rollouts"],
            policy_before=before,
            policy_after=after,
            seconds=time.monotonic() - began_s,
            note=note,
        )
        lost, share = summary["lost_rollouts"], summary["usable_tokens"] / max(1, summary["sampled_tokens"])
        self.check("training: lost rollouts", value=lost, target=0, ok=lost == 0)
        self.check("training: every sampled token can be trained on", value=share, target=1.0, ok=share == 1.0)
        if must_gain:
            gain = None if before is None or after is None else after - before
            ok = gain is not None and gain > 0
            self.check("training: the held-out reward rises by", value=gain, target="more than 0", ok=ok)

    # -- what it found

    def row(
        self,
        *,
        rollouts: int,
        oracle_reward: float | None = None,
        noop_reward: float | None = None,
        policy_before: float | None = None,
        policy_after: float | None = None,
        tool_calls: int | None = None,
        seconds: float | None = None,
        note: str | None = None,
        framework: str | None = None,
    ) -> None:
        """Add a row to the table. ``seconds`` is by default the time since the stack was ready."""
        if seconds is None:
            seconds = time.monotonic() - self._ready_s
        self.rows.append(
            {
                "example": self.example.name,
                "framework": framework or self.framework,
                "rollouts": rollouts,
                "oracle_reward": oracle_reward,
                "noop_reward": noop_reward,
                "policy_before": policy_before,
                "policy_after": policy_after,
                "tool_calls": tool_calls,
                "seconds": round(seconds, 1),
                "note": note,
            }
        )

    def check(self, name: str, *, value: Any, target: Any, ok: bool) -> bool:
        """Add a check. If it is false, the process ends with code 1. Returns ``ok``."""
        self.checks.append({"name": name, "value": value, "target": target, "ok": bool(ok)})
        return bool(ok)

    def check_all_ok(self, results: Sequence[Result], name: str = "every rollout ends ok with a reward") -> bool:
        """A check that no rollout failed; prints the first that did, with its traceback or log."""
        bad = [r for r in results if r.outcome != "ok" or r.reward is None]
        if bad:
            first = bad[0]
            more = first.traceback or first.log or json.dumps(first.result, default=str)[:LOG_TAIL]
            print(visible(f"{first.outcome}: {first.error or 'the record has no reward'}\n{more}"), file=sys.stderr)
        return self.check(name, value=len(results) - len(bad), target=len(results), ok=not bad)

    def _failed(self, error: BaseException) -> None:
        what = "".join(traceback.format_exception_only(error)).strip()
        self.check("the proof runs to its end", value=what, target="no error", ok=False)

    def _broken(self, why: str) -> NoReturn:
        self.check("the stack starts", value=why, target="no error", ok=False)
        self._write()
        print(f"the stack of {self.example.name} did not start:\n{why}", file=sys.stderr)
        sys.exit(1)

    def _write(self) -> None:
        if self.options.json is not None:
            write_report(self.options.json, self.rows, self.checks)


def _run_to_its_end(command: Sequence[str]) -> None:
    """Run a command that starts services. If this process is stopped, the command ends them in order, too."""
    sys.stdout.flush()
    process = None
    try:
        with _sigterm_waits():
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        code = process.wait()
    finally:
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(END_TRAINING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if code != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with code {code}; its output is above")


def end_in_order_on_sigterm() -> None:
    """End everything that was started on SIGTERM, which ends a proof at its deadline."""
    signal.signal(signal.SIGTERM, _stop)


@contextlib.contextmanager
def _sigterm_waits() -> Iterator[None]:
    """A SIGTERM that comes in the block acts after it, so that every process that was started is known and ended."""
    came: list[int] = []
    usual = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)
        if came:
            signal.raise_signal(signal.SIGTERM)


def _stop(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def skip(example: Path, options: argparse.Namespace, why: str) -> NoReturn:
    """End a proof that cannot run on this machine, with code 0. The table of `make examples` shows ``why``."""
    if options.json is not None:
        write_report(options.json, [], [], skipped=why)
    print(f"{example.resolve().name} was skipped: {why}")
    sys.exit(0)


def write_report(
    file: Path, rows: Sequence[Mapping[str, Any]], checks: Sequence[Mapping[str, Any]], skipped: str | None = None
) -> None:
    """Write ``{"rows": ..., "checks": ...}``, whole or not at all."""
    report = {"rows": list(rows), "checks": list(checks), **({"skipped": skipped} if skipped else {})}
    made = file.with_name(f".{file.name}.{os.getpid()}")
    made.write_text(json.dumps(report, indent=2, default=str) + "\n")
    made.replace(file)


def mean(results: Sequence[Result]) -> float:
    """Return the mean reward. A missing reward counts as 0. Raises: ValueError without results."""
    if not results:
        raise ValueError("there is no mean of no rollouts")
    return math.fsum(r.reward or 0.0 for r in results) / len(results)


def tool_calls(*many: Sequence[Result]) -> int:
    """Tool calls of all these rollouts together."""
    return sum(result.tool_calls for results in many for result in results)


def _calls_in(message: bytes | None) -> int:
    """Tool calls of a recorded assistant message, in OpenAI's or Anthropic's form."""
    said = json.loads(message) if message else {}
    if not isinstance(said, dict):
        return 0
    content = said.get("content")
    blocks = content if isinstance(content, list) else []
    return len(said.get("tool_calls") or []) + sum(b.get("type") == "tool_use" for b in blocks if isinstance(b, dict))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as aligned text. A missing value is a dash."""
    lines = [[name.replace("_", " ") for name in COLUMNS]]
    lines += [[_cell(row.get(name)) for name in COLUMNS] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    numbers = {i for i, name in enumerate(COLUMNS) if name not in ("example", "framework", "note")}
    return "\n".join(
        "  ".join(
            c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def checks_text(checks: Sequence[Mapping[str, Any]]) -> str:
    """Return one line per check."""
    return "\n".join(
        f"{'ok    ' if c['ok'] else 'FAILED'}  {c['name']}: {_cell(c['value'])} (target: {_cell(c['target'])})"
        for c in checks
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
