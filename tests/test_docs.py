"""The documents agree with the code: links, commands, options, variables, settings, names, files and defaults."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import itertools
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import click
import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    p
    for top in ROOT.glob("[!.]*")  # an environment in a hidden folder has thousands of files
    for p in (top.rglob("*.md") if top.is_dir() else [top])
    if p.suffix == ".md" and not any(part.startswith(".") or part in ("runs", "node_modules") for part in p.parts)
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_and_anchors_resolve(document: Path) -> None:
    for found in LINK.finditer(document.read_text()):
        target = found.group(1) or found.group(2)
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{target} does not exist"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{target}: no such heading"


def listed_files() -> list[Path]:
    """The files of the repository, the documents only where this is no clone."""
    command = ["git", "-C", str(ROOT), "ls-files"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()
    return [ROOT / name for name in listed if (ROOT / name).is_file()] or list(DOCUMENTS)


def test_sources_refer_only_to_pages_that_exist() -> None:
    """A message, a comment or a setting may name a page of the docs; `CHANGELOG.md` may name pages of the past."""
    kinds = (".py", ".toml", ".md", ".sh", ".yaml", ".yml", ".html", ".js", "")
    for file in listed_files():
        if file.suffix in kinds and file.name not in ("CHANGELOG.md", ".gitignore"):
            for page in re.findall(r"(?<![\w/.])docs/[\w/-]+\.md", file.read_text(errors="ignore")):
                assert (ROOT / page).is_file(), f"{file.relative_to(ROOT)} refers to {page}"


def test_contributing_lists_the_markers_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    markers = {marker.split(":")[0] for marker in project["tool"]["pytest"]["ini_options"]["markers"]}
    assert set(re.findall(r"^\| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)) == markers


def code_lines(document: Path) -> list[str]:
    blocks = re.findall(r"```[a-z]*\n(.*?)```", document.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_every_make_target_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        for line in [*code_lines(document), *SPAN.findall(prose(document))]:
            for name in re.findall(r"^\s*(?:\$ )?make ((?:[a-z-]+ ?)+)", line):
                for target in name.split():
                    assert target in targets, f"{document}: make {target}"


def command_lines(document: Path) -> list[tuple[str, list[str]]]:
    """Each line of a code block that runs `agentcore-rl`, and its words."""
    text = "\n".join(code_lines(document)).replace("\\\n", " ")
    lines = re.findall(r"^\s*(?:\$ )?agentcore-rl (.+)$", text, re.MULTILINE)
    return [(line, line.split("#")[0].split()) for line in lines]


def test_every_command_and_option_in_the_documents_exists() -> None:
    wrong = []
    for document in DOCUMENTS:
        for line, words in command_lines(document):
            path, command, given = resolve(words)
            if isinstance(command, click.Group) and given and not given[0].startswith("-"):
                wrong.append(f"{document.name}: agentcore-rl {line}: no command {given[0]}")
            wrong += [f"{document.name}: agentcore-rl {line}: {word}" for word in refused(path, command, given)]
    assert not wrong, "\n".join(wrong)


def resolve(words: list[str]) -> tuple[str, click.Command, list[str]]:
    """Follow words through the groups of the command line. Returns the command's path, the command, and the other words."""
    from agentcore_rl_toolkit.cli.main import cli

    command: click.Command = cli
    path: list[str] = []
    while isinstance(command, click.Group) and len(path) < len(words):
        found = command.get_command(click.Context(command), words[len(path)])
        if found is None:
            break
        command = found
        path.append(words[len(path)])
    return " ".join(path), command, words[len(path) :]


def refused(path: str, command: click.Command, words: list[str]) -> list[str]:
    """Options that a command does not have, choices that an option does not have, and settings that `--set` refuses."""
    options = {name: parameter for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    wrong = []
    for word, following in itertools.pairwise([*words, ""]):
        name, sign, value = word.partition("=")
        if not re.fullmatch(r"--[a-z][a-z0-9-]*", name) or name == "--help":
            continue
        value = (value if sign else following).strip("'\"")
        parameter = options.get(name)
        if parameter is None:
            wrong.append(f"no option {name}")
        elif isinstance(parameter.type, click.Choice) and value.islower() and value not in parameter.type.choices:
            wrong.append(f"{name} {value}")
        elif name == "--set" and "=" in value and not is_setting(path, value):
            wrong.append(f"--set {value}")
    return wrong


def is_setting(path: str, pair: str) -> bool:
    """Return True if a command's `--set` takes this NAME=VALUE. Without a path, if any command does."""
    from agentcore_rl_toolkit.cli import optimize, options
    from agentcore_rl_toolkit.cli.servers import gateway, runtime
    from agentcore_rl_toolkit.cli.training import sft
    from agentcore_rl_toolkit.cli.training.settings import LocalRun
    from agentcore_rl_toolkit.errors import ConfigError

    if pair == "NAME=VALUE":
        return True
    kinds: dict[str, Any] = {
        "gateway serve": gateway._Rare,
        "runtime serve": runtime._Rare,
        "sft": sft.Imitation,
    }
    kinds |= {"optimize": optimize.SearchSettings}
    for kind in [kinds.get(path, LocalRun)] if path else [LocalRun, *kinds.values()]:
        try:
            options.from_words([pair], kind)
        except ConfigError:
            continue
        return True
    return False


INSTALLING = re.compile(
    r"(?:pip|uv) (?:add|install)[^\n`]*?(?<![\w./-])[\"']?agentcore-rl-toolkit(?![^\s\"']*\s*@)(?![-\w./])"
)


def test_nothing_installs_the_product_that_has_our_name_on_the_package_index() -> None:
    kinds = (".md", ".py", ".toml", ".sh", ".yaml", ".txt")
    for file in listed_files():
        if (file.suffix not in kinds and file.name != "Dockerfile") or file.parts[-2] == "tests":
            continue
        text = file.read_text()
        assert not INSTALLING.search(text), f"{file} installs the published package"
        if file.name == "pyproject.toml" and file.parent != ROOT:
            dependencies = tomllib.loads(text)["project"].get("dependencies", [])
            assert not [d for d in dependencies if d.startswith("agentcore-rl-toolkit")], file
        if file.name.startswith("requirements"):
            assert not re.search(r"^agentcore-rl-toolkit", text, re.MULTILINE), file


def script(name: str) -> Any:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "scripts"))


@pytest.mark.parametrize("name", ["environment_page", "metrics_page", "settings_table"])
def test_a_generated_page_is_up_to_date(name: str) -> None:
    module = script(name)
    assert module.PAGE.read_text() == module.page(), f"run: python scripts/{name}.py (settings_table: --write)"


def test_every_public_name_has_an_entry_in_the_reference() -> None:
    import agentcore_rl_toolkit

    pages = (ROOT / "docs" / "reference" / "python.md").read_text() + (ROOT / "docs" / "errors.md").read_text()
    for name in agentcore_rl_toolkit.__all__:
        assert name == "__version__" or re.search(rf"\b{name}\b", pages), f"{name} is on no page of the reference"


# Names of other products that our code does not contain, by product. Add to them what a page needs.
OTHER_PRODUCTS = {
    "vLLM": "--max-model-len --reasoning-parser --structured-outputs-config",
    "slime, Megatron": "--advantage-estimator --calculate-per-token-loss --clip-grad --colocate --kl-loss-coef --norm-epsilon "
    "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer policy_loss_function",
    "verl": "--use-rollout-entropy colocate_async default_local_dir num_warmup_batches separate_async clip_ratio_high "
    "clip_ratio_low kl_loss_coef lora_rank save_freq test_freq total_training_steps weight_decay",
    "TRL": "epsilon_high generation_batch_size scale_rewards",
    "Ray, Docker, binfmt": "--head --num-cpus --install --privileged",
    "Python": "DeprecationWarning",
    "AWS": "AmazonSageMakerTrainingSessionAccess --model-provider agentcore/agentcore.json agentcore/.cli/deployed-state.json",
    "LangChain, Pydantic AI, Anthropic": "use_responses_api BedrockConverseModel AnthropicBedrock",
    "Node": "--import",
    "SageMaker's kinds of tokens": "billed_prefill_tokens billed_sample_tokens billed_training_tokens",
    "Prometheus": "scrape_configs static_configs metrics_path basic_auth password_file credentials_file",
    "the reader": "OutOfMoves gateway_client some_metric hello.py plan.toml prices.json shop/train.toml RLLM_DIR "
    "src/shop/agent.py tests/a/test_b.py src/agentcore_rl_toolkit/a/b.py",
}
MOVED = ("migration.md", "CHANGELOG.md")  # pages that name what other versions and products have
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
NAME = re.compile(r"(?<![\w./-])[A-Za-z]+(?:_[A-Za-z0-9]+)+(?![\w./-])")
CAMEL = re.compile(r"(?<![\w./<-])[A-Z][a-z]+(?:[A-Z][a-z]*)+\w*")
ATTRIBUTE = re.compile(r"(?<![\w./])[A-Z][a-z]\w+\.([a-z_]\w*)")
FILE = re.compile(r"(?<![\w/.{}*-])[\w-]+(?:/[\w.-]+)*\.(?:py|md|sh|toml|ya?ml|json|jsonl)(?![\w.])")


def words_of_others() -> set[str]:
    return {word for words in OTHER_PRODUCTS.values() for word in words.split()}


def prose(document: Path) -> str:
    return re.sub(r"^( *)```.*?^\1```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def code() -> str:
    """What is in the repository besides the documents and the tests."""
    kinds = (".py", ".toml", ".yaml", ".yml", ".sh", ".html", ".js", "")
    files = [f for f in listed_files() if f.suffix in kinds and f.relative_to(ROOT).parts[0] not in ("docs", "tests")]
    return "\n".join(f.read_text(errors="ignore") for f in files if f.stat().st_size < 400_000)


@pytest.fixture(scope="module")
def words(code: str) -> set[str]:
    return {*re.findall(r"\w+", code)}


def test_every_option_name_and_file_in_the_prose_is_in_the_code(code: str, words: set[str]) -> None:
    from agentcore_rl_toolkit.app.settings import PREFIX, AgentSettings

    others = words_of_others()
    names = {*words, *(PREFIX + name.upper() for name in AgentSettings.__dataclass_fields__)}
    names |= {file.stem for file in listed_files()}
    files = {file.name for file in listed_files()}
    options = set(OPTION.findall(code))
    wrong = []
    for document in (d for d in DOCUMENTS if d.name not in MOVED and d.parts[len(ROOT.parts)] in ("README.md", "docs")):
        places = (ROOT, ROOT / "docs", document.parent, ROOT / "src" / "agentcore_rl_toolkit", ROOT / "examples")
        for span in SPAN.findall(prose(document)):
            found = [option for option in OPTION.findall(span) if option not in options]
            found += [name for name in (*NAME.findall(span), *CAMEL.findall(span)) if name not in names]
            found += [name for name in ATTRIBUTE.findall(span) if not re.search(rf"\b(?:def {name}\(|{name}: )", code)]
            for file in FILE.findall(span):
                named = file in files or file.removeprefix("output_dir/") in code
                found += [] if named or any((place / file).exists() for place in places) else [file]
            wrong += [f"{document.name}: {word} in `{span}`" for word in found if word not in others]
    assert not wrong, "\n".join(wrong)


def test_every_command_in_the_prose_exists() -> None:
    """A span such as `gateway serve --set NAME=VALUE` names a command, its group and its options, with `agentcore-rl` or not."""
    wrong = []
    for document in (d for d in DOCUMENTS if d.name not in (*MOVED, "cli.md")):
        for span in SPAN.findall(prose(document)):
            full, words = span.startswith("agentcore-rl "), span.removeprefix("agentcore-rl ").split()
            path, command, given = resolve(words)
            if not path:
                unknown = full and words and re.fullmatch("[a-z-]+", words[0])
                setting = words[:1] == ["--set"] and "=" in words[-1] and not is_setting("", words[-1])
                wrong += [f"{document.name}: `{span}`"] if unknown or setting else []
            elif full or " " in path or isinstance(command, click.Group) or any(w.startswith("--") for w in given):
                if isinstance(command, click.Group) and given:
                    wrong.append(f"{document.name}: `{span}`")
                wrong += [f"{document.name}: {word} in `{span}`" for word in refused(path, command, given)]
    assert not wrong, "\n".join(wrong)


def known_defaults() -> dict[str, set[Any]]:
    """The defaults of each setting, in all trainers and servers, and of each option of the command line."""
    from agentcore_rl_toolkit.cli.main import cli
    from agentcore_rl_toolkit.cli.servers import gateway, runtime

    found: dict[str, set[Any]] = {}
    for settings in script("settings_table").TRAINERS.values():
        for name, (_, field) in settings.known().items():
            found.setdefault(name, set()).add(str(settings.DEFAULTS.get(name, field.default)))
    for rare in (gateway._Rare, runtime._Rare):
        for name, field in rare.model_fields.items():
            found.setdefault(name, set()).add(str(field.default))
    groups: list[click.Command] = [cli]
    for command in groups:  # grows while it is read
        if isinstance(command, click.Group):
            context = click.Context(command)
            groups += filter(None, (command.get_command(context, name) for name in command.list_commands(context)))
        for parameter in command.params:
            found.setdefault(max(parameter.opts, key=len), set()).add(str(parameter.default))
    return found


# Defaults of other products, and sentences about what a default is.
NO_DEFAULT_OF_OURS = (
    "boto3",
    "verl's default",
    "TRL's own default",
    "`DEFAULT`",
    "`app.model(default=",
    "the engines report",
    "follow from the size",
    "those of Weights & Biases",
    "the default if there is no such file",
    "fields and defaults",
    " `default` ",
    "`_training`",
    "the id of a model on Amazon Bedrock",
    "These are defaults that you may change",
)


def test_the_defaults_in_the_prose_are_those_of_the_code() -> None:
    """A sentence or a cell with a default names its setting, or is one of the texts that are made from the code here."""
    facts, known = texts_with_defaults(), known_defaults()
    for page, texts in facts.items():
        for text in texts:
            assert text in " ".join((ROOT / page).read_text().split()), f"{page}: {text}"
    wrong = []
    for document in (d for d in DOCUMENTS if d.is_relative_to(ROOT / "docs") or d == ROOT / "README.md"):
        generated = document.name in (*MOVED, "settings.md", "metrics.md", "environment.md", "cli.md")
        page = str(document.relative_to(ROOT))
        text = re.sub(r"\]\([^)]*\)", "]", "" if generated else prose(document))
        for name, number in [(n, v) for v, n in re.findall(r"(\d[\d,.]*)(?: \w+)? \(`(?:--set )?([\w-]+)`\)", text)]:
            if name in known and not any(same(number, default) for default in known[name]):
                wrong.append(f"{page}: {name} is {known[name]}, not {number}")
        for sentence in re.split(r"(?<=[.!?])\s+|\||\n(?=\s*[-*#])", text):
            stated = re.search(r"\bdefaults?\b|unless (?:it is|you) set", sentence, re.IGNORECASE)
            if not stated or any(words in sentence for words in NO_DEFAULT_OF_OURS):
                continue
            plain = " ".join(sentence.split())
            if any(plain in fact or fact in plain for fact in facts.get(page, ())):
                continue
            spans = [word for span in SPAN.findall(sentence) for word in span.removeprefix("--set ").split()]
            names = [span for span in spans if span in known]
            values = re.findall(r"(?<![\w`.])\d[\d,.]*\d|(?<![\w`.])\d", sentence) + [
                span for span in spans if span not in known
            ]
            if values and not any(
                same(value, default) for name in names for default in known[name] for value in values
            ):
                wrong.append(f"{page}: {plain}: names no setting with this default")
    assert not wrong, "\n".join(wrong)


def same(text: str, default: str) -> bool:
    with contextlib.suppress(ValueError):
        return float(text.replace(",", "").rstrip(".")) == float(default)
    return text == default


def texts_with_defaults() -> dict[str, tuple[str, ...]]:
    """Texts that must be in a page, made from the defaults of the code."""
    from agentcore_rl_toolkit import AgentCoreRLApp
    from agentcore_rl_toolkit.backends.collection.settings import LimitSettings
    from agentcore_rl_toolkit.backends.llm_judge import JudgeSettings
    from agentcore_rl_toolkit.backends.rllm import RllmConfig
    from agentcore_rl_toolkit.backends.slime import SlimeRunner
    from agentcore_rl_toolkit.backends.verl.settings import AgentCoreConfig
    from agentcore_rl_toolkit.cli.servers.gateway import _Rare
    from agentcore_rl_toolkit.cli.training.settings import LocalRun, by_size
    from agentcore_rl_toolkit.client.settings import Deadlines, WatchSettings
    from agentcore_rl_toolkit.contract import DEFAULT_TRAIN
    from agentcore_rl_toolkit.gateway import Limits
    from agentcore_rl_toolkit.isolation.sandbox import TierName
    from agentcore_rl_toolkit.runtime.config import TimeLimits

    def of(settings: Any, name: str) -> Any:
        return settings.DEFAULTS.get(name, settings.known()[name][1].default)

    usual, slime, gateway, runtime = LimitSettings(), SlimeRunner, Limits(), TimeLimits()
    at_once = (of(LocalRun, "max_concurrent"), of(slime, "max_concurrent"), of(AgentCoreConfig, "max_concurrent"))
    times = [of(s, "rollout_timeout_s") for s in (LocalRun, RllmConfig, AgentCoreConfig)]
    tiny = by_size(None)
    declared = inspect.signature(AgentCoreRLApp.rollout_entrypoint).parameters["on_policy_failure"]
    trl = re.search(r'"loss_type": "(\w+)"', (ROOT / "src/agentcore_rl_toolkit/backends/trl/adapter.py").read_text())
    assert trl is not None
    return {
        "docs/operate.md": (
            f"{at_once[0]} (`train`), {at_once[1]} (slime), {at_once[2]} (verl, rLLM), {usual.max_concurrent} (other",
            f"{times[0]:g} s (`train`), {times[1]:g} s (rLLM), {times[2]:,.0f} s (verl), {usual.rollout_timeout_s:g} s (other",
            f"{usual.tps_limit} per second",
            f"{gateway.call_s:,.0f} s; a silent stream {gateway.stream_idle_s:g} s",
            f"{gateway.body_bytes >> 20} MB, {gateway.reply_bytes >> 20} MB",
        ),
        "docs/gateway.md": (f"{gateway.body_bytes >> 20} MiB", f"for {gateway.orphan_s:g} s (`--set orphan_timeout`)"),
        "docs/your-agent.md": (
            f"may take {JudgeSettings().judge_timeout_s:g} s (`judge_timeout_s`)",
            f"{of(LocalRun, 'groups')} inputs, each of them {of(LocalRun, 'rollouts')} times",
        ),
        "docs/runtime.md": (
            *(f"`{tier}` (default" for tier in get_args(TierName)[:2]),
            f"{runtime.idle_timeout_s:g} s without work",
            f"{runtime.max_lifetime_s:,.0f} s in all",
        ),
        "docs/algorithms.md": tuple(
            f"{of(s, low)}, {of(s, high)}, none |"
            for s, low, high in ((LocalRun, "clip_low", "clip_high"), (slime, "eps_clip", "eps_clip_high"))
        ),
        "docs/policy.md": (
            f"{tiny['learning_rate']:.0e}".replace("e-0", "e-") + f" | all | {tiny['tokens_at_once']:,} | no |",
        ),
        "docs/rendering.md": (f"`{_Rare().history}` (default)", f"`{_Rare().forced_tools}` (default)"),
        "docs/agent.md": (f'This is the default (`@app.rollout_entrypoint(train="{DEFAULT_TRAIN}")`).',),
        "docs/trajectory.md": (f"`{DEFAULT_TRAIN}` (default)",),
        "docs/concepts.md": (f"the agent declares, {declared.default:g} by default.",),
        "docs/client.md": (
            f"The default of `run` is the limit of the service, {(Deadlines().run_s or 0) // 3600:g} h.",
            f"after {3 * WatchSettings().heartbeat_s + 5:g} s by default;",
        ),
        "docs/backends/trl.md": (f"The default here is `{trl[1]}`",),
        "docs/security.md": (f"With `--isolation {get_args(TierName)[0]}` (the default on Linux",),
        "docs/scale.md": (f"by default on port {of(slime, 'gateway_port')}.",),
    }


def test_every_variable_file_and_key_in_the_code_blocks_exists(words: set[str]) -> None:
    names = {*words, *re.findall(r"\w+", script("environment_page").page()), *words_of_others()}
    file = re.compile(r"(?<![\w/.{}*$-])(?:benchmarks|deploy|docs|examples|scripts|src|tests)/[\w./-]+\.\w+")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wrong = []
    for document in (d for d in DOCUMENTS if d.name not in MOVED):
        text, lines = document.read_text(), "\n".join(code_lines(document))
        found = [v for v in re.findall(r"\bAGENTCORE_[A-Z_]+[A-Z]\b", text) if v not in names]
        found += [
            f
            for f in file.findall(lines)
            if f not in names and not any((p / f).exists() for p in (ROOT, document.parent))
        ]
        found += [
            e for given in re.findall(r"\.(?:whl)?\[([\w,]+)\]", text) for e in given.split(",") if e not in extras
        ]
        found += [e for e in re.findall(r"\bextra `(\w+)`", text) if e not in extras]
        for block in re.findall(r"```(?:yaml|toml)\n(.*?)```", text, re.DOTALL):
            found += [key for key in re.findall(r"^[ -]*(\w+) ?[:=]", block, re.MULTILINE) if key not in names]
        wrong += [f"{document.relative_to(ROOT)}: {word}" for word in found]
    assert not wrong, "\n".join(wrong)


def test_every_python_block_uses_names_and_keywords_that_exist() -> None:
    wrong = []
    for document in (d for d in DOCUMENTS if d.name not in MOVED):
        for block in re.findall(r"^ *```python\n(.*?)^ *```", document.read_text(), re.DOTALL | re.MULTILINE):
            wrong += [f"{document.name}: {what}" for what in wrong_names(ast.parse(textwrap.dedent(block)))]
    assert not wrong, "\n".join(wrong)


def wrong_names(program: ast.Module) -> Iterator[str]:
    """Names of this package that a program imports and that do not exist, and keywords that they do not take."""
    from agentcore_rl_toolkit.backends.settings import Settings

    ours: dict[str, Any] = {}
    for node in ast.walk(program):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "agentcore_rl_toolkit":
            for alias in node.names:
                if not has(f"{node.module}.{alias.name}"):
                    yield f"{node.module} has no {alias.name}"
                    continue
                with contextlib.suppress(ImportError):  # a trainer that is not installed
                    ours[alias.asname or alias.name] = getattr(importlib.import_module(node.module), alias.name, None)
    for node in ast.walk(program):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and callable(ours.get(node.func.id)):
            keywords = [word.arg for word in node.keywords if word.arg is not None]
            called = ours[node.func.id]
            if issubclass(called, Settings) if isinstance(called, type) else False:
                taken = {*called.known(), *called.ALIASES}
            else:
                parameters = inspect.signature(called).parameters
                any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
                taken = {*parameters, *(keywords if any_keyword else ())}
            yield from (f"{node.func.id} takes no {word}" for word in keywords if word not in taken)


def test_every_route_in_the_documents_is_served(code: str) -> None:
    def plain(path: str) -> str:
        return re.sub(r"\{\w+\}|\bID\b", "{}", path).strip("/").removeprefix("v1/")

    paths = {plain(path) for path in re.findall(r"[\"']([\w/{}.:-]+)[\"']", code) if "/" in path}
    paths |= {plain(path) for path in re.findall(r'\("(?:GET|PUT|POST|DELETE)", "([^"]+)"', code)}
    wrong = []
    for document in DOCUMENTS:
        text = re.sub(r"^## Routes\n.*?(?=^#)", "", prose(document), flags=re.DOTALL | re.MULTILINE)  # below
        for span in SPAN.findall(text):
            for path in re.findall(r"^(?:GET|POST|PUT|DELETE|PATCH) /(?:_local(?=/))?([^\s?]*)", span):
                wrong += [] if plain(path) in paths else [f"{document.name}: {span}"]
        for path in re.findall(r"\bcurl \S*https?://[^/\s]+(/[^\s?]+)", "\n".join(code_lines(document))):
            wrong += [] if plain(path) in paths else [f"{document.name}: {path}"]
    assert not wrong, "\n".join(wrong)


def test_the_page_of_the_gateway_lists_the_routes_of_agents() -> None:
    from agentcore_rl_toolkit.gateway import dispatch
    from agentcore_rl_toolkit.messages.wire import DIALECTS

    _, _, page = (ROOT / "docs" / "gateway.md").read_text().partition("## Routes")
    rows = [line.split("|")[1] for line in page.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    listed = {re.sub(r"\{\w+\}", "{}", path) for row in rows for path in re.findall(r"`\w+ /([^`]+)`", row)}
    served = {dialect.path for dialect in DIALECTS.values()} | {path.decode() for path in dispatch._COUNTS}
    served |= {"models", "models/{model}", "embeddings"}
    served |= {"bedrock/model/{model}/converse-stream", "bedrock/model/{model}/invoke-with-response-stream"}
    assert listed == {re.sub(r"\{\w+\}", "{}", path) for path in served}


def has(name: str) -> bool:
    """Return True if a dotted name is a module of src, or a name that its module contains."""
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        module = (ROOT / "src").joinpath(*parts[:size])
        file = module.with_suffix(".py") if module.with_suffix(".py").is_file() else module / "__init__.py"
        if file.is_file():
            return size == len(parts) or re.search(rf"\b{parts[size]}\b", file.read_text()) is not None
    return False


def test_every_dotted_name_of_the_package_in_the_documents_exists() -> None:
    dotted = re.compile(r"\bagentcore_rl_toolkit(?:\.\w+)+")
    documents = [d for d in DOCUMENTS if d.name not in MOVED]
    wrong = [f"{d.name}: {name}" for d in documents for name in dotted.findall(d.read_text()) if not has(name)]
    assert not wrong, "\n".join(wrong)
