"""The requests of both APIs, with their limits, and the errors of their responses.

Source: botocore's models `sagemaker` (CreateTrainingSession and its siblings) and `sagemakertrainingsessionruntime`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from ....errors import PolicyError

T = TypeVar("T")
REGION, ACCOUNT = "us-west-2", "123456789012"  # of all names that the service gives
STATUS = {
    "AccessDeniedException": 403,
    "ResourceNotFoundException": 404,
    "ConflictException": 409,
    "ThrottlingException": 429,
    "InternalServerException": 500,
}  # all others are 400

_SAGEMAKER = r"^arn:aws[a-z\-]*:sagemaker:[a-z0-9\-]+:[0-9]{12}:"
PackageArn = Annotated[str, Meta(pattern=_SAGEMAKER + r"model-package/[^/\s]+/[0-9]+$")]
GroupArn = Annotated[str, Meta(pattern=_SAGEMAKER + r"model-package-group/[^/\s]+$")]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Beta = Annotated[float, Meta(ge=0, le=0.999999)]


class RefusedError(PolicyError):
    """A request that is answered with an error of AWS's. ``code``: its name there."""

    def __init__(self, message: str, *, code: str = "ValidationException", **ids: Any) -> None:
        super().__init__(message, **ids)
        self.code = code


def arn(resource: str) -> str:
    """The name of a resource of this service."""
    return f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:{resource}"


def read(body: bytes, kind: type[T]) -> T:
    """Raises: RefusedError that names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise RefusedError(str(e)) from e


# -- the control plane


def page(key: str, found: list[dict[str, Any]], asked: Mapping[str, Any]) -> dict[str, Any]:
    """A page of a list: ``MaxResults`` entries, 10 unless the request says so, as of AWS's lists; from ``NextToken`` on."""
    first, size = int(asked.get("NextToken", 0)), asked.get("MaxResults", 10)
    more = {"NextToken": str(first + size)} if first + size < len(found) else {}
    return {key: found[first : first + size], **more}


class LoraConfig(Struct, rename="pascal"):
    rank: Annotated[int, Meta(ge=1, le=256)]
    alpha: Annotated[int, Meta(ge=1)]


class ModelConfig(Struct, rename="pascal"):
    base_model_arn: Annotated[
        str, Meta(pattern=r"^arn:[a-z0-9-.]+:sagemaker:[a-z0-9-]+:[a-z0-9]+:hub-content/.+/Model/.+")
    ]
    accept_eula: bool | UnsetType = UNSET


class CreateTrainingSession(Struct, rename="pascal", kw_only=True):
    training_session_name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}$")]
    lora_config: LoraConfig
    role_arn: Annotated[str, Meta(pattern=r"^arn:aws[a-z\-]*:iam::[0-9]{12}:role/")]
    model_config: ModelConfig
    output_config: dict[str, Any]
    model_package_group_arn: GroupArn | UnsetType = UNSET
    vpc_config: dict[str, Any] | UnsetType = UNSET
    tags: list[dict[str, str]] | UnsetType = UNSET


# -- the runtime


class _Strict(Struct, rename="camel", forbid_unknown_fields=True):
    """An object without fields that are not known here."""


class Chunk(_Strict):
    tokens: Annotated[list[int], Meta(min_length=1)]
    type: Literal["encoded_text"]


class ModelInput(_Strict):
    chunks: Annotated[list[Chunk], Meta(min_length=1)]

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]


class Tensor(_Strict):
    data: list[int | float]
    dtype: Literal["int64", "int32", "float32", "float16", "bfloat16"]
    shape: list[int] | None = None


class Datum(_Strict):
    """``ref_log_prob`` and ``temperature``, which AWS also takes, are not computed here."""

    model_input: ModelInput
    loss_fn_inputs: dict[Literal["target_tokens", "weights", "logprobs", "advantages"], Tensor] = field(
        default_factory=dict
    )


class LossConfig(Struct, forbid_unknown_fields=True):
    clip_low_threshold: Fraction = 0.8
    clip_high_threshold: Annotated[float, Meta(ge=1, le=10)] = 1.2


class Pass(_Strict):
    loss_fn_name: Literal["cross_entropy", "importance_sampling", "ppo", "cispo"]
    datum_list: Annotated[list[Datum], Meta(min_length=1)]
    loss_fn_config: LossConfig = field(default_factory=LossConfig)


class Adam(_Strict):
    """Nothing here is LoRA, so ``lora_plus_lr_ratio`` changes nothing."""

    learning_rate: Annotated[float, Meta(gt=0, le=0.01)]
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: Annotated[float, Meta(ge=1e-16, le=0.01)] = 1e-12
    weight_decay: Fraction = 0.0
    grad_clip_norm: Annotated[float, Meta(ge=0, le=100)] = 0.0
    lora_plus_lr_ratio: Annotated[float, Meta(ge=1, le=100)] = 1.0


class OptimizerStep(_Strict):
    adam_params_config: Adam


class Save(_Strict):
    merge_weights: bool = False
    description: Annotated[str, Meta(max_length=1024)] = ""


class Load(_Strict):
    """``load_optimizer`` belongs to loadState only."""

    model_package_arn: PackageArn
    load_optimizer: bool = False


class SamplingParams(_Strict):
    max_tokens: Annotated[int, Meta(ge=512, le=131072)]
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_k: int = -1
    top_p: Fraction = 1.0
    seed: int | None = None
    stop: list[str] | None = None


class ComputeLogprobs(_Strict):
    prompt: ModelInput
    model_package_arn: PackageArn | None = None


class Sample(ComputeLogprobs, kw_only=True):
    """``includePromptLogprobs`` and ``topkPromptLogprobs``, which AWS also takes, are not computed here."""

    num_samples: Annotated[int, Meta(ge=1, le=1000)]
    sampling_params: SamplingParams


class OperationConfig(_Strict):
    """The operation of a request: exactly one of them."""

    @property
    def member(self) -> tuple[str, Any]:
        """Its name on the wire and its content. Raises: RefusedError."""
        given = {f.encode_name: getattr(self, f.name) for f in msgspec.structs.fields(self)}
        found = [(name, content) for name, content in given.items() if content is not None]
        if len(found) != 1:
            raise RefusedError("exactly one member of operationConfig must be set")
        return found[0]


class TrainingConfig(OperationConfig):
    forward: Pass | None = None
    forward_backward: Pass | None = None
    optimizer_step: OptimizerStep | None = None
    save_weights: Save | None = None
    save_state: Save | None = None
    load_state: Load | None = None


class SamplingConfig(OperationConfig):
    sample: Sample | None = None
    compute_logprobs: ComputeLogprobs | None = None
    load_weights_for_sampling: Load | None = None


class TrainingOperation(_Strict):
    sequence_number: Annotated[int, Meta(ge=1)]
    operation_config: TrainingConfig
    client_token: Annotated[str, Meta(pattern="^[a-zA-Z0-9-]{1,128}$")] | None = None


class SamplingOperation(_Strict):
    operation_config: SamplingConfig
