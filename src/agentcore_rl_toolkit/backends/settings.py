"""Configuration files of the backends: read, checked against a dataclass, shown as a plan."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import re
import shlex
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ..client.data import read_rows, read_text
from ..contract import check_id
from ..errors import ConfigError, ContractError, MissingExtraError

T = TypeVar("T")

ENV_AGENT_ARN = "AGENTCORE_AGENT_ARN"
ENV_S3_BUCKET = "AGENTCORE_S3_BUCKET"

_ARN = re.compile(r"arn:[^:\s]+:bedrock-agentcore:[^:\s]+:[^:\s]*:runtime/\S+")


Count = Annotated[int, Field(ge=1)]
Least0 = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
GroupSize = Annotated[int, Field(ge=2)]  # with one there is nothing to compare
# Text that means itself without quotes. What begins like a number, or is a word of the grammar, does not.
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_WORDS = frozenset({"true", "false", "null", "nan", "inf"})
_KEY, _ESCAPED = re.compile(r"([\\()\[\]{}:=, \t])"), r"\\\1"  # keys of a mapping take no quotes
_BEFORE_QUOTE = re.compile(r"(\\+)(?='|$)")


def hydra_value(value: Any) -> str:
    """A value as an override's right side: numbers, booleans and null as such, text always as text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_KEY.sub(_ESCAPED, str(k))}:{hydra_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    # In quotes a backslash is itself unless it stands before a quote.
    return "'" + _BEFORE_QUOTE.sub(lambda m: m[1] * 2, text).replace("'", "\\'") + "'"


def unquoted(text: str) -> str:
    """The text that a quoted value means; any other as it is."""
    if len(text) < 2 or text[0] not in "'\"" or text[-1] != text[0]:
        return text
    quote = text[0]
    inner = re.sub(rf"(\\+)(?={quote})", lambda m: "\\" * (len(m[1]) // 2), text[1:-1])
    return re.sub(r"(\\+)$", lambda m: "\\" * (len(m[1]) // 2), inner)


def check(config: Any) -> None:
    """Check the numbers and choices of a dataclass whose types say what they must be. Raises: ConfigError naming the field."""
    kind_of: Any = type(config)
    for name, hint in _hints(kind_of).items():
        kinds = {typing.get_origin(kind) for kind in (hint, *typing.get_args(hint))}
        if kinds & {Annotated, typing.Literal}:
            fit(getattr(config, name), hint, name)


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _shown(name: str, value: str) -> str:
    """A variable as a plan shows it; keys stay out of terminals and logs."""
    return "(set)" if name.endswith(("_KEY", "_TOKEN", "_SECRET")) else shlex.quote(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a training run: shown by ``--dry-run``, executed otherwise.

    `facts` are (name, value) lines for people; `command` is the exact command of a trainer that runs as its own
    process, None when it runs in this one; `environment` holds the variables that are added to it; `needs` names what
    is missing here.
    """

    backend: str
    facts: Sequence[tuple[str, str]]
    command: Sequence[str] | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs: Sequence[str] = ()

    def render(self) -> str:
        """The plan as text; the command is quoted so that it can be pasted into a shell."""
        width = max((len(name) for name, _ in self.facts), default=0)
        lines = [f"backend: {self.backend}", *(f"  {name:<{width}}  {value}" for name, value in self.facts)]
        if self.environment:
            lines += ["environment:", *(f"  {k}={_shown(k, v)}" for k, v in sorted(self.environment.items()))]
        if self.command is not None:
            lines += ["command:", "  " + _wrapped(self.command)]
        if self.needs:
            lines += ["missing on this machine:", *(f"  {need}" for need in self.needs)]
        return "\n".join(lines)


def read_settings(path: str | Path) -> dict[str, Any]:
    """A configuration file (.yaml, .yml, .toml or .json) as a dict.

    Raises: ConfigError when it is missing, unreadable or not a mapping; MissingExtraError for YAML without PyYAML.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no configuration file {path}")
    text = read_text(path)
    try:
        if path.suffix == ".toml":
            loaded: Any = tomllib.loads(text)
        elif path.suffix == ".json":
            loaded = json.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            loaded = _yaml(text)
        else:
            raise ConfigError(f"{path}: configuration files are .yaml, .toml or .json")
    except ConfigError:
        raise
    except (ValueError, RecursionError) as e:  # not in this format, a number of thousands of digits, nested too deeply
        raise ConfigError(f"{path}: {e}") from e
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected keys and values, got {type(loaded).__name__}")
    return loaded


def from_mapping(cls: type[T], values: Mapping[str, Any], *, where: str) -> T:
    """Make a configuration dataclass from a mapping.

    Lists become tuples where a tuple is asked for, numbers in text (YAML reads ``1e-6`` as text) become numbers.
    Raises: ConfigError naming the key on an unknown or missing one (with the nearest known name), or a wrong type.
    """
    known: Any = cls
    hints = _hints(known)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]  # T is a dataclass
    unknown = [str(name) for name in values if name not in fields]
    if unknown:
        near = difflib.get_close_matches(unknown[0], fields, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else f"; known: {', '.join(fields)}"
        raise ConfigError(f"{where}: unknown key `{unknown[0]}`{hint}")
    required = [
        n
        for n, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and n not in values
    ]
    if required:
        raise ConfigError(f"{where}: missing {', '.join(f'`{n}`' for n in required)}")
    made = {}
    for name, value in values.items():
        try:
            made[name] = fit(value, hints[name], f"{where}: `{name}`")
        except ConfigError:
            if fields[name].repr:
                raise
            raise ConfigError(f"{where}: `{name}` has a value that does not fit (a secret, not shown)") from None
    return cls(**made)


def with_environment(values: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Fill `agent_runtime_arn` and `s3_bucket` from AGENTCORE_AGENT_ARN and AGENTCORE_S3_BUCKET where the file has none."""
    filled = dict(values)
    for key, name in (("agent_runtime_arn", ENV_AGENT_ARN), ("s3_bucket", ENV_S3_BUCKET)):
        if filled.get(key) is None and environ.get(name):
            filled[key] = environ[name]
    return filled


def check_run(agent_runtime_arn: str, s3_bucket: str, exp_id: str) -> None:
    """The three names that every run has. Raises: ConfigError."""
    if not _ARN.fullmatch(agent_runtime_arn):
        raise ConfigError(
            f"agent_runtime_arn {agent_runtime_arn!r} is not the ARN of an agent: it reads "
            "arn:aws:bedrock-agentcore:REGION:ACCOUNT:runtime/NAME"
        )
    if not s3_bucket.strip():
        raise ConfigError("s3_bucket is empty: give a bucket or a store URL")
    try:
        check_id(exp_id, "exp_id")
    except ContractError as e:
        raise ConfigError(str(e)) from e


def planned(config: Any, *, exp_id: str | None = None, data: Path | None = None) -> list[tuple[str, str]]:
    """A plan's lines about the settings: those that are not the defaults, and how many rows ``data`` has.

    Raises: ConfigError when agent, bucket or experiment cannot be such, or the data cannot be read.
    """
    check_run(config.agent_runtime_arn, config.s3_bucket, config.exp_id if exp_id is None else exp_id)
    facts = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.repr and value not in (None, (), {}, field.default):
            facts.append((field.name, str(value)))
    return facts if data is None else [*facts, ("rows", f"{len(read_rows(data))} in {data}")]


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False))


def fit(value: Any, hint: Any, name: str) -> Any:
    """Convert a value to this type with pydantic. Raises: ConfigError."""
    try:
        return _adapter(hint).validate_python(value)
    except (ValidationError, ValueError, OverflowError) as e:
        why = e.errors()[0]["msg"] if isinstance(e, ValidationError) else str(e)
        raise ConfigError(f"{name} {why.replace('Input should be', 'must be')}, got {repr(value)[:80]}") from e


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as e:
        raise MissingExtraError("reading .yaml files needs PyYAML (or use .toml):\n    pip install pyyaml") from e
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise ConfigError(f"the YAML cannot be read: {e}") from e


def _wrapped(command: Sequence[str]) -> str:
    """One option per line, continued with backslashes."""
    lines: list[str] = []
    for word in command:
        quoted = shlex.quote(word)
        if not lines or word.startswith("-") or "=" in word or (lines[-1].startswith("-") and " " in lines[-1]):
            lines.append(quoted)
        else:
            lines[-1] += f" {quoted}"
    return " \\\n    ".join(lines)
