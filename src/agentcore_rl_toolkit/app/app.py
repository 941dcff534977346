"""`AgentCoreRLApp`: the AgentCore app of a rollout agent."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from bedrock_agentcore.runtime import BedrockAgentCoreApp, PingStatus
from starlette.exceptions import HTTPException

from ..contract import ROLLOUTS_OFF, RolloutConfig, check_train, redact_payload
from ..errors import ConfigError
from ..logs import configure_logging
from ..proof import seal
from ..store import ObjectStore, parse_url
from ..store.boto import PutOnlyStore
from ..store.remote import find_region, find_session
from .engine import Engine, is_rollout
from .model import CURRENT, Call, Default, Model, resolve
from .record import PolicyReward, RolloutInfo, check_policy_reward, success_body
from .rollout import RolloutFunction
from .runner import wait_for
from .sagemaker.job import check_reports_nothing
from .settings import AgentSettings


class AgentCoreRLApp(BedrockAgentCoreApp):  # type: ignore[misc]  # the base class is untyped
    """A `BedrockAgentCoreApp` that also runs rollouts: in the background, with a stored result.

    Takes the base class's arguments. Constructing it opens nothing: no socket, no thread, no client, so the process may be
    snapshotted or forked afterwards. Settings come from the environment at the first rollout, or from `settings`.

    Args:
        rollouts: True or False turn rollouts on or off, as the setting ``AGENTCORE_RL_ROLLOUTS`` does. If one of them turns them
            off, they are off. Without both, they are off in an app that has an `entrypoint` or a `websocket`, and on in others.
        foreground: without an `entrypoint`, answer a payload that is no rollout with what the rollout function returns. False:
            answer it at once and run the function in the background, as the published package does.

    Example:
        app = AgentCoreRLApp()

        @app.entrypoint
        def answer(payload: dict) -> dict:
            model = app.model(default="us.anthropic.claude-sonnet-4-20250514-v1:0")
            return {"answer": solve(payload["prompt"], model)}

        @app.rollout_entrypoint
        def rollout(payload: dict) -> dict:
            return {"rewards": score(answer(payload), payload["answer"])}

        app.run()
    """

    def __init__(
        self,
        debug: bool = False,
        lifespan: Callable[[Any], Any] | None = None,
        middleware: Sequence[Any] | None = None,
        *,
        settings: AgentSettings | None = None,
        rollouts: bool | None = None,
        foreground: bool = True,
        **base: Any,
    ) -> None:
        configure_logging()
        super().__init__(debug=debug, lifespan=self._with_shutdown(lifespan), middleware=middleware, **base)
        self._s3_client: Any = None
        self._s3_client_is_own = False
        self._rollouts, self._foreground = rollouts, foreground
        self._production: Callable[..., Any] | None = None
        self._served = False  # True from the first call on
        self._rollout: Callable[..., Any] | None = None
        self._rollout_function: RolloutFunction | None = None
        self._engine = Engine(
            settings=lambda: settings or AgentSettings.from_env(),
            on_start=self.add_async_task,
            on_end=self.complete_async_task,
            own_store=self._own_store,
        )

    @property
    def add_rollouts(self) -> bool:
        """True for an agent that is trained as it is. One with a rollout function takes rollouts itself."""
        return self._rollout_function is None

    def entrypoint(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Register the function of production calls, as on `BedrockAgentCoreApp`, which serves them."""
        if func is self._rollout:
            raise ConfigError(
                "remove @app.entrypoint from the rollout function: @app.rollout_entrypoint also serves production calls"
            )
        self._production = func
        return super().entrypoint(func)  # type: ignore[no-any-return]  # the base class is untyped

    def ping(self, func: Callable[[], Any]) -> Callable[[], Any]:
        """Register the function that tells the status, as on `BedrockAgentCoreApp`. While a rollout runs it is HealthyBusy."""
        super().ping(lambda: PingStatus.HEALTHY_BUSY if self._engine.busy else func())
        return func

    def model(self, default: Default = None) -> Model:
        """Return the model to call. Call this in the function, each time.

        It is the first of these that exists: the rollout's model, that of AgentCore's configuration bundle (``base_url``,
        ``model_id``), that of ``AGENTCORE_RL_MODEL_URL`` and ``AGENTCORE_RL_MODEL_ID``, and ``default``: the id of a model of
        Amazon Bedrock, or a mapping with `base_url`, `model_id`, `api_key` and `sampling_params`.

        Raises:
            ConfigError: If there is no model, if a bundle cannot be read, in a task that outlived its rollout, and in a thread
                without the context of its call.
        """
        needs_call = self._served and self._rollout is not None and self._takes_rollouts()
        return resolve(default, self._engine.settings, needs_call)

    def rollout_entrypoint(
        self,
        func: Callable[..., Any] | None = None,
        *,
        on_policy_failure: PolicyReward = 0.0,
        policy_failures: tuple[type[BaseException], ...] = (),
        train: str | None = None,
    ) -> Callable[..., Any]:
        """Register the rollout function: sync or async, ``(payload)`` or ``(payload, context)``.

        With ``exp_id``, ``input_id`` and ``s3_bucket`` in ``payload["_rollout"]`` the dict it returns is stored under
        ``{exp_id}/{input_id}/{session_id}.json``. Without them nothing is stored. The call is answered at once, and `/ping` is
        ``HealthyBusy`` until the record is stored. An invocation by a multi-turn RL job of Amazon SageMaker runs the same
        function and is answered after its reward is reported to the job.

        Args:
            on_policy_failure: the score of a rollout that raises because the policy failed (out of tokens, turns or context, or
                calls that do not parse): a number, a dict with `reward` and metrics, or None to leave such rollouts out of
                training.
            policy_failures: the agent's exceptions for such failures, besides `PolicyFailure` and those of frameworks.
            train: which of the agent's conversations train: "task" (the default: all but side calls such as titles), "main",
                "all", or a tag of its calls. Client and trainer may set another.

        Raises:
            ConfigError: For a generator function, an unusable reward or rule, and a function that reports its rewards to a job
                itself.
        """
        policy_reward = check_policy_reward(on_policy_failure)
        given: Any = policy_failures  # callers may be untyped
        classes = given if isinstance(given, tuple) else (given,)
        if not all(isinstance(cls, type) and issubclass(cls, BaseException) for cls in classes):
            raise ConfigError(f"policy_failures must be a tuple of exception classes, got {given!r}")
        rule = None if train is None else check_train(train)
        register = functools.partial(self._register, policy_reward=policy_reward, policy_failures=classes, train=rule)
        return register if func is None else register(func)

    def _register(self, func: Callable[..., Any], **declared: Any) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise ConfigError(f"{func.__name__} is a generator: a rollout function must return one dict")
        check_reports_nothing(func)
        name = getattr(func, "__name__", None) or type(func).__name__
        function = RolloutFunction(call=func, name=name, takes_context=_takes_context(func), **declared)

        @functools.wraps(func, assigned=("__module__", "__doc__"), updated=())
        async def rollout(payload: Any, context: Any) -> Any:
            if is_rollout(payload) and not self._takes_rollouts():
                raise HTTPException(403, ROLLOUTS_OFF)
            return await self._engine.accept(function, payload, context)

        rollout.__name__ = name
        del rollout.__wrapped__  # the SDK reads the signature, and must find (payload, context)
        self._rollout, self._rollout_function = rollout, function
        return rollout if self._production is not None else super().entrypoint(rollout)

    def _takes_rollouts(self) -> bool:
        stated = {self._rollouts, self._engine.settings.rollouts} - {None}
        if stated:
            return False not in stated
        return self._production is None and self._websocket_handler is None

    def _build_request_context(self, request: Any) -> Any:
        self._served = True
        CURRENT.set(CURRENT.get() or Call())  # a rollout that calls the entrypoint keeps its own
        return super()._build_request_context(request)

    def _ensure_worker_loop(self) -> asyncio.AbstractEventLoop:
        """Run async production functions on the loop of async rollout functions."""
        return self._engine.runner.loop()

    async def _invoke_handler(self, handler: Any, request_context: Any, takes_context: bool, payload: Any) -> Any:
        """Accept rollouts on the server's loop, where no agent code runs. The base class serves every other call."""
        rollout, serve = self._rollout, super()._invoke_handler
        answers = handler is rollout and self._foreground and isinstance(payload, Mapping)
        if rollout is not None and (is_rollout(payload) or (handler is rollout and not answers)):
            return await rollout(payload, request_context)
        if self._rollout_function is None or not answers:
            return await serve(handler, request_context, takes_context, payload)
        function = self._rollout_function
        result = await serve(function.call, request_context, function.takes_context, payload)
        if inspect.isawaitable(result):  # a partial or lambda around an async function
            result = await serve(wait_for, request_context, False, result)
        return result.get("response", result) if isinstance(result, Mapping) else getattr(result, "response", result)

    def save_result(
        self,
        result: Mapping[str, Any],
        rollout_config: RolloutConfig | Mapping[str, Any],
        result_key: str,
        payload: Mapping[str, Any] | None = None,
    ) -> None:
        """Store a result under a key by hand, in the form that `rollout_entrypoint` stores it; `result` stays as it is.

        Raises: ContractError, InvalidResultError, StoreError; ConfigError when the config names no store.
        """
        given = rollout_config
        config = given if isinstance(given, RolloutConfig) else RolloutConfig.from_dict(given)
        if config.s3_bucket is None:
            raise ConfigError("save_result needs a config with exp_id, input_id and s3_bucket")
        session_id = result_key.rpartition("/")[2].removesuffix(".json")
        info = RolloutInfo(config=config, session_id=session_id, result_key=result_key, payload=redact_payload(payload))
        body, _ = success_body(info, result, max_bytes=self._engine.settings.max_record_bytes)
        secret = config.proof_key or self._engine.proof_key_of(result_key)
        if secret is not None:
            body = seal(body, result_key, secret)
        self._engine.store_for(config.s3_bucket, config.s3_region)[0].put(result_key, body)

    def run(self, *args: Any, **options: Any) -> None:
        """Serve, with the arguments of the base class."""
        configure_logging(everything=True)
        # Loaded here and not at import: a template that sessions are forked or restored from pays for it once, and it starts no
        # thread. Sessions would each spend 20 ms of CPU on it at their first write to S3.
        with contextlib.suppress(ImportError):
            import obstore.store  # noqa: F401  # for its side effect of being loaded
        super().run(*args, **options)

    @property
    def s3_client(self) -> Any:
        """The S3 client that records go through once it is replaced. Until then records go through `agentcore_rl_toolkit.store`.

        Reading it makes an ordinary boto3 client on first use. Assign your own client to use other credentials or another
        endpoint for plain bucket names. The agent then writes no heartbeats.
        """
        if self._s3_client is None:
            self._s3_client = find_session().client("s3", region_name=find_region())
        return self._s3_client

    @s3_client.setter
    def s3_client(self, client: Any) -> None:
        self._s3_client = client
        self._s3_client_is_own = client is not None

    def _own_store(self, url: str) -> ObjectStore | None:
        parts = parse_url(url)
        if not self._s3_client_is_own or parts.scheme != "s3" or parts.prefix:
            return None
        return PutOnlyStore(f"s3://{parts.bucket}", self._s3_client, parts.bucket, "")

    def _with_shutdown(self, lifespan: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
        @contextlib.asynccontextmanager
        async def with_shutdown(app: Any) -> AsyncIterator[Any]:
            self._engine.open()
            restore = self._engine.interrupt_on_sigterm()
            try:
                if lifespan is None:
                    yield
                else:
                    async with lifespan(app) as state:
                        yield state
            finally:
                await self._engine.close("the server shut down before the agent had finished")
                restore()

        return with_shutdown


def _takes_context(func: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 and (positional[1].name == "context" or positional[1].default is positional[1].empty)
