"""The model that an agent calls: the trained one in a rollout, in production a configured one or the agent's default."""

from __future__ import annotations

import base64
import functools
import os
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from bedrock_agentcore.runtime.context import BedrockAgentCoreContext

from ..contract import RolloutConfig
from ..errors import ConfigError
from ..store.remote import find_session
from .settings import PREFIX, AgentSettings

Default = str | Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call: the settings of its rollout, empty in a production call, and whether its agent has ended."""

    config: RolloutConfig = field(default_factory=RolloutConfig)
    ended: Callable[[], bool] = lambda: False


# The running call. None: this thread belongs to no call.
CURRENT: ContextVar[Call | None] = ContextVar("agentcore_rl_call", default=None)

TOKEN_S = 12 * 3600  # AWS's maximum
# Hosts that take a bearer token which is signed with AWS credentials.
_SIGNED = re.compile(
    r"(?:runtime\.(sagemaker)|(bedrock)-(?:runtime|mantle))\.([a-z0-9-]+)\.(?:amazonaws\.com(?:\.cn)?|api\.aws)"
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model to call.

    Attributes:
        base_url: an address of OpenAI's API. None: ``model_id`` is a model of Amazon Bedrock.
        sampling_params: those of the rollout.
        source: of the address: rollout, bundle, environment or default.
    """

    base_url: str | None = None
    model_id: str = ""
    key: str | None = field(default=None, repr=False)
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    source: str

    @property
    def api_key(self) -> str:
        """The given key, or for an address of SageMaker or Bedrock a fresh bearer token of this process's role.

        A rollout's address gets no token: its caller would choose what this role pays.
        """
        parts = urlsplit(self._address)
        ours = parts.scheme == "https" and (self.base_url is None or self.source != "rollout")
        signed = _SIGNED.fullmatch(parts.hostname or "") if ours else None
        key = self.key or (os.environ.get("AWS_BEARER_TOKEN_BEDROCK") if signed and signed[2] else None)
        return key or (bearer_token(signed[1] or signed[2], signed[3]) if signed else "none")

    def openai_kwargs(self) -> dict[str, Any]:
        """Return the address and key, as arguments of `openai.OpenAI`, `openai.AsyncOpenAI` and LangChain's `ChatOpenAI`."""
        return {"base_url": self._address, "api_key": self.api_key}

    def strands_model(self, **params: Any) -> Any:
        """Make a model of Strands, with ``params`` such as `max_tokens`. The rollout's sampling parameters win over them."""
        if self.base_url is None:
            from strands.models.bedrock import BedrockModel

            return BedrockModel(model_id=self.model_id, **{**params, **self.sampling_params})
        from strands.models.openai import OpenAIModel

        asked = {"extra_body": dict(self.sampling_params)} if self.sampling_params else {}
        client_args = {**self.openai_kwargs(), "http_client": _http_client()}
        return OpenAIModel(client_args=client_args, model_id=self.model_id, params={**params, **asked})

    def bedrock_client(self, **options: Any) -> Any:
        """Make a boto3 client of `bedrock-runtime`, for calls with ``modelId=model.model_id``. In a rollout it calls the gateway.

        Raises: ConfigError for another model at an address.
        """
        options = {"region_name": os.environ.get("AWS_REGION"), **options}
        if self.base_url is None:
            return _aws().client("bedrock-runtime", **options)
        if self.source != "rollout":
            raise ConfigError(
                f"bedrock_client() cannot reach the {self.source}'s model at {self.base_url}, which speaks OpenAI's API: use "
                "openai_kwargs() or strands_model()"
            )
        from botocore import UNSIGNED
        from botocore.config import Config

        config = Config(signature_version=UNSIGNED).merge(options.get("config") or Config())
        options |= {"region_name": options["region_name"] or "us-east-1", "endpoint_url": f"{self.base_url}/bedrock"}
        client = _aws().client("bedrock-runtime", **{**options, "config": config})
        key = f"Bearer {self.api_key}"  # botocore itself sends keys over HTTPS only
        client.meta.events.register(
            "before-call.bedrock-runtime", lambda params, **_: params["headers"].update(Authorization=key)
        )
        return client

    @property
    def _address(self) -> str:
        if self.base_url is not None:
            return self.base_url
        region = os.environ.get("AWS_REGION") or _aws().region_name
        if not region:
            raise ConfigError("the model's AWS region is not known: set AWS_REGION")
        return f"https://bedrock-runtime.{region}.amazonaws.com/openai/v1"


def resolve(default: Default, settings: AgentSettings, needs_call: bool) -> Model:
    """Find the model of the running call; ``needs_call``: a thread that knows none may be a rollout's. Raises: ConfigError."""
    call = CURRENT.get()
    if needs_call if call is None else call.ended():
        raise ConfigError(
            "app.model() was called in a thread without the context of its call, or after its rollout had ended: call it in the "
            "function itself, or run the thread with contextvars.copy_context().run"
        )
    rollout = {} if call is None else call.config.to_dict()
    if rollout.get("base_url"):
        return _model(rollout, "rollout")
    asked = {name: rollout[name] for name in ("model_id", "sampling_params") if rollout.get(name)}
    try:
        bundle = BedrockAgentCoreContext.get_config_bundle()
    except Exception as e:  # whatever boto3 raises: another model in its place would be a silent error
        raise ConfigError(
            f"AgentCore's configuration bundle of this call cannot be read ({type(e).__name__}: {e}); the agent's role needs "
            "bedrock-agentcore:GetConfigurationBundleVersion"
        ) from e
    named = {"base_url": settings.model_url, "model_id": settings.model_id, "api_key": settings.model_api_key}
    given = {"model_id": default} if isinstance(default, str) else default
    for values, source in ((bundle, "bundle"), (named, "environment"), (given, "default"), (asked, "rollout")):
        if isinstance(values, Mapping) and (values.get("base_url") or values.get("model_id")):
            return _model({**values, **asked}, source)
    raise ConfigError(
        f"there is no model for this call: give app.model() a default, or set {PREFIX}MODEL_URL and {PREFIX}MODEL_ID"
    )


def _model(values: Mapping[str, Any], source: str) -> Model:
    url, name = values.get("base_url") or None, str(values.get("model_id") or "")
    if url is not None and not str(url).startswith(("http://", "https://")):
        raise ConfigError(f"the {source}'s base_url must begin with http:// or https://, got {url!r}")
    params = values.get("sampling_params") or {}
    return Model(base_url=url, model_id=name, key=values.get("api_key"), sampling_params=params, source=source)


@functools.cache
def _http_client() -> Any:
    """Return the HTTP client of Strands' models, which reads the certificates once: that takes 30 ms of CPU.

    Strands makes a client for each model call, and closes it. Each request has its own connection, because calls may be on
    several event loops.
    """
    import httpx
    from openai import DefaultAsyncHttpxClient

    options: dict[str, Any] = {
        "verify": httpx.create_ssl_context(),
        "limits": httpx.Limits(max_keepalive_connections=0),
    }

    class Client(DefaultAsyncHttpxClient):
        async def send(self, request: Any, **given: Any) -> Any:
            return await DefaultAsyncHttpxClient(**options).send(request, **given)

        async def aclose(self) -> None:
            pass

        def __reduce__(self) -> Any:  # copies of a model share it
            return _http_client, ()

    return Client(**options)


@functools.cache
def _aws() -> Any:
    return find_session()


def bearer_token(service: str, region: str) -> str:
    """Sign a bearer token for `sagemaker` or `bedrock`. It lasts 12 hours, or as long as the credentials do.

    Source: sagemaker-core, `token_generator`; aws-bedrock-token-generator.
    """
    from botocore.auth import SigV4QueryAuth
    from botocore.awsrequest import AWSRequest

    credentials, host = _aws().get_credentials(), f"{service}.amazonaws.com"
    if credentials is None:
        raise ConfigError(f"a bearer token for {service} needs AWS credentials, and there are none")
    request = AWSRequest("POST", f"https://{host}/", headers={"host": host}, params={"Action": "CallWithBearerToken"})
    SigV4QueryAuth(credentials.get_frozen_credentials(), service, region, expires=TOKEN_S).add_auth(request)
    signed = request.url.removeprefix("https://") + "&Version=1"
    return f"{service}-api-key-{base64.b64encode(signed.encode()).decode()}"
