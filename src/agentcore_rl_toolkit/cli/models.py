"""Names of models on the command line: a folder, a run, a name on the Hugging Face hub, or a GGUF file."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..errors import ConfigError
from ..runs.folder import is_run, read_config
from .output.commands import nearby, program

_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
WORDS = "folder, run, hub name (ORG/NAME or ORG/NAME@REVISION) or GGUF file"


class Model(click.ParamType[Any]):
    """A model by any of its names, as a folder. With ``weights`` False, only the tokenizer is fetched from the hub."""

    name = "model"

    def __init__(self, *, weights: bool = True, besides: str | None = None) -> None:
        self._weights = weights
        self._besides = besides

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == self._besides else model_folder(value, weights=self._weights)


def model_option(**changes: Any) -> Callable[[Any], Any]:
    """Return the option `--model` of a command that serves or trains one."""
    options = {"help": f"The model: {WORDS} [default: the built-in policy].", "metavar": "MODEL", "type": Model()}
    return click.option("--model", **{**options, **changes})


def model_folder(name: str | Path, *, weights: bool = True) -> Path:
    """Return the folder of a model, or of a run's model. Raises: ConfigError with the fault of the name."""
    path = Path(name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"--model {path} is a file; a model is a {WORDS}")
        from ..policy.loading import converted

        return converted(path)
    if not path.is_dir():
        hub = _HUB_NAME.fullmatch(str(name))
        if hub is None:
            raise ConfigError(f"there is no model folder {name}")
        path = from_hub(hub[1], hub[2], weights=weights)
    if is_run(path):
        run, path = path, path / "policy"
        if not path.is_dir() and read_config(run).get("kind") in ("eval", "optimize"):
            raise ConfigError(f"{run} is an evaluation or a search for texts, which has no model")
        if not path.is_dir():
            raise ConfigError(
                f"{run} has no model, because its training has not ended: continue it with "
                f"`{program()} train --resume --out {nearby(run)}`"
            )
    if weights and not (path / "config.json").is_file():
        raise ConfigError(f"{path} holds no model: it lacks config.json, which transformers writes")
    return path.resolve()


def from_hub(name: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return the folder of a hub's model in the cache. Download it if it is missing. Raises: ConfigError."""
    from huggingface_hub import snapshot_download

    files = [*_TOKENIZER_FILES, *(["*.safetensors"] if weights else [])]
    ignored = ["*/*", "consolidated*.safetensors"]
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=files, ignore_patterns=ignored))
    except Exception as e:  # its HTTP library has many errors
        if getattr(e, "errno", None) == errno.ENOSPC:
            raise
        at = f" --revision {revision}" if revision else ""
        raise ConfigError(
            f"there is no model folder {name} here, and the hub gave none ({str(e).strip().partition(chr(10))[0]}): correct the "
            "name, or accept the model's terms on its page and run `hf auth login`. Without network, run "
            f"`hf download {name}{at}` on another machine with `--local-dir {name.partition('/')[2]}`, and copy that folder here"
        ) from e
    if weights and not any(folder.glob("*.safetensors")):
        raise ConfigError(f"the hub's model {name} has no weights as safetensors in its cache {folder}")
    return folder
