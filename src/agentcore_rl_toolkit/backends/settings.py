"""Settings of trainers: read from files, checked, in groups, shown as a plan."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import os
import re
import shlex
import sys
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from ..client.data import read_rows, read_text
from ..contract import check_id
from ..errors import ConfigError, ContractError, MissingExtraError

ENV_AGENT_ARN = "AGENTCORE_AGENT_ARN"
ENV_S3_BUCKET = "AGENTCORE_S3_BUCKET"

_ARN = re.compile(r"arn:[^:\s]+:bedrock-agentcore:[^:\s]+:[^:\s]*:runtime/\S+")


Count = Annotated[int, Field(ge=1)]
Least0 = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
GroupSize = Annotated[int, Field(ge=2)]  # a group of one has nothing to compare
# Text that needs no quotes. Text that begins like a number, or is a word of the grammar, needs them.
_PLAIN = re.compile(r"(?!(true|false|null|nan|inf)$)[A-Za-z_/][A-Za-z0-9_./-]*", re.IGNORECASE)


def hydra_value(value: Any) -> str:
    """Convert a value to an override's right side: numbers, booleans and null as such, text always as text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{hydra_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    # Only backslashes in front of a quote, also the closing one, are doubled (hydra.cc, "Basic override syntax").
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: 2 * m[1] + ("\\'" if m[2] else ""), text) + "'"


@contextlib.contextmanager
def fault_of_the_command() -> Iterator[None]:
    """End the process with a message and exit code 2 on a wrong setting or a missing package, as `agentcore-rl` does."""
    try:
        yield
    except (ConfigError, MissingExtraError) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)


def _shown(name: str, value: str) -> str:
    return "(set)" if name.endswith(("_KEY", "_TOKEN", "_SECRET")) else shlex.quote(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a training run: shown by ``--dry-run``, executed otherwise.

    `facts` are (name, value) lines for people; `command` is the exact command of a trainer that runs as its own
    process, None when it runs in this one; `environment` holds the variables that are added to it; `needs` lists what
    this machine lacks.
    """

    backend: str
    facts: Sequence[tuple[str, str]]
    command: Sequence[str] | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs: Sequence[str] = ()

    def render(self) -> str:
        """Return the plan as text. The command is quoted so that it can be pasted into a shell."""
        width = max((len(name) for name, _ in self.facts), default=0)
        lines = [f"backend: {self.backend}", *(f"  {name:<{width}}  {value}" for name, value in self.facts)]
        if self.environment:
            lines += ["environment:", *(f"  {k}={_shown(k, v)}" for k, v in sorted(self.environment.items()))]
        if self.command is not None:
            lines += ["command:", "  " + _wrapped(self.command)]
        if self.needs:
            lines += ["missing on this machine:", *(f"  {need}" for need in self.needs)]
        return "\n".join(lines)


class SettingsGroup(BaseModel):
    """Settings that belong together, keyword-only and frozen. Each name is unique in a whole configuration.

    ``ALIASES`` are other names of settings, those of published toolkits and of the trainer itself.
    Raises: ConfigError, with the nearest known name for an unknown one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
    ALIASES: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # type checkers know the fields

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as e:
                raise ConfigError(self._problem(e)) from e

    @classmethod
    def _problem(cls, e: ValidationError) -> str:
        problem = e.errors()[0]
        name = str(problem["loc"][0]) if problem["loc"] else ""
        if isinstance(inner := problem.get("ctx", {}).get("error"), ConfigError):
            return str(inner)
        if problem["type"] == "extra_forbidden":
            return f"unknown setting `{name}`{near(name, [*cls.known(), *cls.ALIASES])}"
        if problem["type"] == "missing":
            return f"missing `{name}`"
        if not cls.model_fields[name].repr:
            return f"`{name}` has a value that does not fit (a secret, not shown)"
        why = problem["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
        return f"`{name}` {why.partition(', unable to parse')[0]}, got {repr(problem['input'])[:80]}"

    @classmethod
    @functools.cache
    def known(cls) -> Mapping[str, tuple[str, FieldInfo]]:
        """Return each setting by name: its group, empty for one without a group, and its definition."""
        groups = _groups(cls)
        found = {name: ("", field) for name, field in cls.model_fields.items() if name not in groups}
        return found | {name: (group, f) for group, part in groups.items() for name, f in part.model_fields.items()}

    @classmethod
    def kinds(cls) -> dict[str, Any]:
        """Return the type of each setting by name, without its limits."""
        hints = [typing.get_type_hints(part) for part in (cls, *_groups(cls).values())]
        return {name: hint for found in hints for name, hint in found.items() if name in cls.known()}

    def replace(self, **changes: Any) -> Self:
        return type(self)(**{**dict(self), **changes})

    @classmethod
    def from_values(cls, values: Mapping[str, Any], *, where: str) -> Self:
        """Make settings of a file or a command line. Raises: ConfigError that begins with ``where``."""
        try:
            return cls(**values)
        except ConfigError as e:
            raise ConfigError(f"{where}: {e}") from e


class Settings(SettingsGroup):
    """The settings of a trainer, in groups.

    A setting is accepted and read with or without its group's name: ``tps_limit`` is ``limits.tps_limit``. ``DEFAULTS`` differ
    from the groups' own.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, **values: Any) -> None:
        known, groups = self.known(), _groups(type(self))
        flat = {**self.DEFAULTS, **self.complete(self.plain(values))}
        missing = [name for name, (_, field) in known.items() if field.is_required() and name not in flat]
        if missing:
            raise ConfigError(f"missing {', '.join(f'`{name}`' for name in missing)}")
        nested: dict[str, dict[str, Any]] = {group: {} for group in ("", *groups)}
        for name, value in flat.items():
            nested[known[name][0]][name] = value
        super().__init__(**nested.pop(""), **{group: groups[group](**members) for group, members in nested.items()})

    @classmethod
    def plain(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values without groups, under the settings' own names.

        Raises: ConfigError on an unknown name, or on two names of one setting.
        """
        given: dict[str, str] = {}  # the name of each setting as it was given
        flat: dict[str, Any] = {}
        known, groups = cls.known(), _groups(cls)
        for name, value in values.items():
            members = dict(value) if isinstance(value, (Mapping, SettingsGroup)) and name in groups else {name: value}
            for member, setting in members.items():
                place = cls.ALIASES.get(member, member)
                if place not in known:
                    raise ConfigError(f"unknown setting `{member}`{near(member, [*known, *cls.ALIASES])}")
                if place in given:
                    raise ConfigError(f"`{member}` and `{given[place]}` are names of one setting: keep one of them")
                given[place], flat[place] = member, setting
        return flat

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Add settings that follow from the given ones, which are not checked yet. Raises: ConfigError."""
        return given

    def __getattr__(self, name: str) -> Any:
        place = self.ALIASES.get(name, name)
        if name.startswith("_") or place not in self.known():
            raise AttributeError(f"{type(self).__name__} has no setting {name!r}")
        group = self.known()[place][0]
        return getattr(getattr(self, group) if group else self, place)

    def flat(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.known()}

    def shown(self) -> dict[str, Any]:
        """Return the settings without secrets, as a run's folder keeps them."""
        return {name: value for name, value in self.flat().items() if self.known()[name][1].repr}

    def replace(self, **changes: Any) -> Self:
        return type(self)(**{**self.flat(), **{self.ALIASES.get(name, name): v for name, v in changes.items()}})

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a file (YAML, TOML or JSON). AGENTCORE_AGENT_ARN and AGENTCORE_S3_BUCKET fill what it leaves out."""
        return cls.from_values(with_environment(read_settings(path)), where=str(path))


def near(name: str, known: Sequence[str]) -> str:
    """Return the end of the error for an unknown name: the nearest known one, or all of them."""
    found = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean `{found[0]}`?" if found else f"; known: {', '.join(known)}"


def _groups(kind: type[SettingsGroup]) -> dict[str, type[SettingsGroup]]:
    kinds = {name: field.annotation for name, field in kind.model_fields.items()}
    return {name: part for name, part in kinds.items() if isinstance(part, type) and issubclass(part, SettingsGroup)}


def read_settings(path: str | Path) -> dict[str, Any]:
    """Read a configuration file (.yaml, .yml, .toml or .json) as a dict.

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
    except (ValueError, RecursionError) as e:  # another format, a number with thousands of digits, or too deep nesting
        raise ConfigError(f"{path}: {e}") from e
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: the file must contain names and values of settings, got {type(loaded).__name__}")
    return loaded


def with_environment(values: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Fill `agent_runtime_arn` and `s3_bucket` from AGENTCORE_AGENT_ARN and AGENTCORE_S3_BUCKET if the file has none."""
    filled = dict(values)
    for key, name in (("agent_runtime_arn", ENV_AGENT_ARN), ("s3_bucket", ENV_S3_BUCKET)):
        if filled.get(key) is None and environ.get(name):
            filled[key] = environ[name]
    return filled


def planned(config: Settings, *, data: Path | None = None) -> list[tuple[str, str]]:
    """Return a plan's lines about the settings: those that are not the defaults, and the number of rows of ``data``.

    Raises: ConfigError when agent, bucket or experiment have invalid names, or the data cannot be read.
    """
    if not _ARN.fullmatch(config.agent_runtime_arn):
        raise ConfigError(
            f"agent_runtime_arn {config.agent_runtime_arn!r} is not the ARN of an agent, such as "
            "arn:aws:bedrock-agentcore:REGION:ACCOUNT:runtime/NAME"
        )
    if not config.s3_bucket.strip():
        raise ConfigError("s3_bucket is empty: give a bucket or a store URL")
    try:
        check_id(config.exp_id, "exp_id")
    except ContractError as e:
        raise ConfigError(str(e)) from e
    facts = []
    for name, value in config.shown().items():
        default = config.DEFAULTS.get(name, config.known()[name][1].default)
        if value not in (None, (), {}, default):
            facts.append((name, str(value)))
    return facts if data is None else [*facts, ("rows", f"{len(read_rows(data))} in {data}")]


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
    """Return the options, one per line, continued with backslashes."""
    lines: list[str] = []
    for word in command:
        quoted = shlex.quote(word)
        if not lines or word.startswith("-") or "=" in word or (lines[-1].startswith("-") and " " in lines[-1]):
            lines.append(quoted)
        else:
            lines[-1] += f" {quoted}"
    return " \\\n    ".join(lines)
