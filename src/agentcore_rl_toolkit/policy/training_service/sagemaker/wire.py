"""The requests of both APIs, with their limits, and the errors of their responses.

Source: botocore's models `sagemaker` (CreateTrainingSession and its siblings) and `sagemakertrainingsessionruntime`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

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

Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}$")]
Arn = Annotated[str, Meta(pattern=r"^arn:aws[a-z\-]*:")]
PackageArn = Annotated[
    str, Meta(pattern=r"^arn:aws[a-z\-]*:sagemaker:[a-z0-9\-]+:[0-9]{12}:model-package/[^/\s]+/[0-9]+$")
]
GroupArn = Annotated[
    str, Meta(pattern=r"^arn:aws[a-z\-]*:sagemaker:[a-z0-9\-]+:[0-9]{12}:model-package-group/[^/\s]+$")
]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Beta = Annotated[float, Meta(ge=0, le=0.999999)]
Description = Annotated[str, Meta(max_length=1024)]


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
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise RefusedError(str(e)) from e


# -- the control plane


class _Pascal(Struct, rename="pascal", kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    pass


class LoraConfig(_Pascal):
    rank: Annotated[int, Meta(ge=1, le=256)]
    alpha: Annotated[int, Meta(ge=1)]


class ModelConfig(_Pascal):
    base_model_arn: Annotated[
        str,
        Meta(
            pattern=r"^arn:[a-z0-9-.]+:sagemaker:[a-z0-9-]+:([0-9]{12}|aws):hub-content/[^/]+/Model/[^/]+(/[0-9.]+)?$"
        ),
    ]
    accept_eula: bool | UnsetType = UNSET


class CreateTrainingSession(_Pascal):
    training_session_name: Name
    lora_config: LoraConfig
    role_arn: Arn
    model_config: ModelConfig
    output_config: dict[str, Any]
    model_package_group_arn: GroupArn | UnsetType = UNSET
    vpc_config: dict[str, Any] | UnsetType = UNSET
    tags: list[dict[str, str]] | UnsetType = UNSET


class NamedSession(_Pascal):
    """The request of DescribeTrainingSession, StopTrainingSession and DeleteTrainingSession."""

    training_session_name: Name


class Page(Struct, rename="pascal", kw_only=True):
    """A request for a list; filters that it does not know are no filters."""

    name_contains: str = ""
    status_equals: str | None = None
    creation_time_after: float = 0.0
    creation_time_before: float = float("inf")
    model_package_group_name: str | None = None
    sort_order: Literal["Ascending", "Descending"] = "Descending"
    max_results: Annotated[int, Meta(ge=1, le=100)] = 100
    next_token: Annotated[str, Meta(pattern="^[0-9]+$")] = "0"


class NamedPackage(Struct, rename="pascal"):
    model_package_name: str


class NamedGroup(Struct, rename="pascal"):
    model_package_group_name: str


class NamedContent(Struct, rename="pascal"):
    hub_content_name: str


# -- the runtime


class _Camel(Struct, rename="camel", kw_only=True, forbid_unknown_fields=True):
    pass


class Chunk(_Camel):
    tokens: Annotated[list[int], Meta(min_length=1)]
    type: Literal["encoded_text"]


class ModelInput(_Camel):
    chunks: Annotated[list[Chunk], Meta(min_length=1)]

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]


class Tensor(_Camel):
    data: list[int | float]
    dtype: Literal["int64", "int32", "float32", "float16", "bfloat16"]
    shape: list[int] | None = None


class Datum(_Camel):
    """``ref_log_prob`` and ``temperature``, which AWS also takes, are not computed here."""

    model_input: ModelInput
    loss_fn_inputs: dict[Literal["target_tokens", "weights", "logprobs", "advantages"], Tensor] = msgspec.field(
        default_factory=dict
    )


class LossConfig(Struct, forbid_unknown_fields=True):
    clip_low_threshold: Fraction = 0.8
    clip_high_threshold: Annotated[float, Meta(ge=1, le=10)] = 1.2


class Pass(_Camel):
    """The configuration of forward and forwardBackward."""

    loss_fn_name: Literal["cross_entropy", "importance_sampling", "ppo", "cispo"]
    datum_list: Annotated[list[Datum], Meta(min_length=1)]
    loss_fn_config: LossConfig = msgspec.field(default_factory=LossConfig)


class Adam(_Camel):
    learning_rate: Annotated[float, Meta(gt=0, le=0.01)]
    beta1: Beta | None = None
    beta2: Beta | None = None
    eps: Annotated[float, Meta(ge=1e-16, le=0.01)] | None = None
    weight_decay: Fraction | None = None
    grad_clip_norm: Annotated[float, Meta(ge=0, le=100)] | None = None
    lora_plus_lr_ratio: Annotated[float, Meta(ge=1, le=100)] | None = None


class OptimizerStep(_Camel):
    adam_params_config: Adam


class SaveWeights(_Camel):
    merge_weights: bool = False
    description: Description = ""


class SaveState(_Camel):
    description: Description = ""


class LoadState(_Camel):
    model_package_arn: PackageArn
    load_optimizer: bool


class SamplingParams(_Camel):
    max_tokens: Annotated[int, Meta(ge=512, le=131072)]
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: int | None = None
    top_p: Fraction | None = None
    seed: int | None = None
    stop: list[str] | None = None


class Sample(_Camel):
    """``includePromptLogprobs`` and ``topkPromptLogprobs``, which AWS also takes, are not computed here."""

    prompt: ModelInput
    num_samples: Annotated[int, Meta(ge=1, le=1000)]
    sampling_params: SamplingParams
    model_package_arn: PackageArn | None = None


class ComputeLogprobs(_Camel):
    prompt: ModelInput
    model_package_arn: PackageArn | None = None


class LoadWeights(_Camel):
    model_package_arn: PackageArn


class TrainingConfig(_Camel):
    """Exactly one of them."""

    forward: Pass | None = None
    forward_backward: Pass | None = None
    optimizer_step: OptimizerStep | None = None
    save_weights: SaveWeights | None = None
    save_state: SaveState | None = None
    load_state: LoadState | None = None


class SamplingConfig(_Camel):
    """Exactly one of them."""

    sample: Sample | None = None
    compute_logprobs: ComputeLogprobs | None = None
    load_weights_for_sampling: LoadWeights | None = None


class TrainingOperation(_Camel):
    sequence_number: Annotated[int, Meta(ge=1)]
    operation_config: TrainingConfig
    client_token: Annotated[str, Meta(pattern="^[a-zA-Z0-9-]{1,128}$")] | None = None


class SamplingOperation(_Camel):
    operation_config: SamplingConfig


def member(config: TrainingConfig | SamplingConfig) -> tuple[str, Any]:
    """Name on the wire and content of the one operation that is set. Raises: RefusedError."""
    found = [
        (field.encode_name, content)
        for field in msgspec.structs.fields(config)
        if (content := getattr(config, field.name)) is not None
    ]
    if len(found) != 1:
        raise RefusedError("exactly one member of operationConfig must be set")
    return found[0]
