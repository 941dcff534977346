"""Configuration files of the backends: read, checked against a dataclass, shown as a plan."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import os
import re
import shlex
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from ..contract import check_id
from ..errors import ConfigError, ContractError, MissingExtraError
from .data import read_rows, read_text

T = TypeVar("T")

_LARGEST = 2**63 - 1  # what a trainer's own integers hold
ENV_AGENT_ARN = "AGENTCORE_AGENT_ARN"
ENV_S3_BUCKET = "AGENTCORE_S3_BUCKET"

_ARN = re.compile(r"arn:[^:\s]+:bedrock-agentcore:[^:\s]+:[^:\s]*:runtime/\S+")


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a number of a setting must be: in words, and whether one is. Belongs into the field's type (`check`)."""

    words: str
    fits: Callable[[float], bool]


Count = Annotated[int, Rule("at least 1", lambda v: v >= 1)]
Least0 = Annotated[int, Rule("at least 0", lambda v: v >= 0)]
Positive = Annotated[float, Rule("a positive, finite number", lambda v: v > 0 and math.isfinite(v))]
NotNegative = Annotated[float, Rule("a finite number and not negative", lambda v: v >= 0 and math.isfinite(v))]
Port = Annotated[int, Rule("a port from 0 (any free one) to 65535", lambda v: 0 <= v <= 65535)]
GroupSize = Annotated[int, Rule("at least 2, or there is nothing to compare", lambda v: v >= 2)]


def check(config: Any) -> None:
    """Check the fields of a dataclass whose types say what they must be: a `Rule`, or a choice of literals. None is left alone.

    Raises: ConfigError naming the field.
    """
    kind_of: Any = type(config)
    for name, hint in _hints(kind_of).items():
        value = getattr(config, name)
        for kind in (hint, *typing.get_args(hint)):
            rule = next((m for m in getattr(kind, "__metadata__", ()) if isinstance(m, Rule)), None)
            if rule is not None and value is not None and not rule.fits(value):
                raise ConfigError(f"{name} must be {rule.words}, got {value!r}")
        if typing.get_origin(hint) is typing.Literal and value not in typing.get_args(hint):
            raise ConfigError(f"{name} must be one of {', '.join(map(repr, typing.get_args(hint)))}, got {value!r}")


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _shown(name: str, value: str) -> str:
    """A variable as a plan shows it; keys stay out of terminals and logs."""
    return "(set)" if name.endswith(("_KEY", "_TOKEN", "_SECRET")) else shlex.quote(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a training run would do: shown by ``--dry-run``, executed otherwise.

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

    Nested dataclasses are made from nested mappings, lists become tuples where a tuple is asked for, numbers in text
    (YAML reads ``1e-6`` as text) become numbers.
    Raises: ConfigError naming the key on an unknown or missing one (with the nearest known name), or a wrong type.
    """
    hints = typing.get_type_hints(cls)
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
            made[name] = _fit(value, hints[name], f"{where}: `{name}`")
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
    """What a plan says of a run's settings: those that are not the defaults, and how many rows ``data`` has.

    Raises: ConfigError when agent, bucket or experiment cannot be such, or the data cannot be read.
    """
    check_run(config.agent_runtime_arn, config.s3_bucket, config.exp_id if exp_id is None else exp_id)
    facts = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.repr and value not in (None, (), {}, field.default):
            facts.append((field.name, str(value)))
    return facts if data is None else [*facts, ("rows", f"{len(read_rows(data))} in {data}")]


def _fit(value: Any, hint: Any, where: str) -> Any:
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        last: ConfigError | None = None
        for option in (a for a in arguments if a is not type(None)):
            try:
                return _fit(value, option, where)
            except ConfigError as e:
                last = e
        raise last or ConfigError(f"{where} may not be {value!r}")
    if origin is typing.Literal:
        if value not in arguments:
            raise ConfigError(f"{where} must be one of {', '.join(map(repr, arguments))}, got {value!r}")
        return value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} must be a section with keys, got {value!r}")
        return from_mapping(hint, value, where=where)
    return _fit_plain(value, origin or hint, arguments, where)


def _fit_plain(value: Any, kind: Any, arguments: tuple[Any, ...], where: str) -> Any:
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError) as e:
            raise ConfigError(f"{where} must be a number, got {str(value)[:80]!r}") from e
        if not math.isfinite(number):
            raise ConfigError(f"{where} must be a finite number, got {value!r}")
        return number
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > _LARGEST:
            raise ConfigError(f"{where} must be at most {_LARGEST}, got a number of {len(str(abs(value)))} digits")
        return value
    if kind in (str, bool) and isinstance(value, kind):
        return value
    if kind is Path and isinstance(value, (str, Path)):
        return Path(value)
    if kind is tuple and isinstance(value, (list, tuple)):
        return tuple(_fit(v, arguments[0], where) for v in value)
    if isinstance(kind, type) and issubclass(kind, Mapping) and isinstance(value, Mapping):
        return dict(value)
    raise ConfigError(f"{where} must be {getattr(kind, '__name__', kind)}, got {value!r}")


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
