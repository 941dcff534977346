"""The documents agree with the code: links, commands, options, variables, settings, names, files and defaults."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    p
    for p in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part in ("runs", "node_modules") for part in p.parts)
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
        for line in code_lines(document):
            for name in re.findall(r"^\s*(?:\$ )?make ((?:[a-z-]+ ?)+)", line):
                for target in name.split():
                    assert target in targets, f"{document}: make {target}"


def test_every_command_and_option_in_the_documents_exists() -> None:
    from agentcore_rl_toolkit.cli.main import cli

    for document in DOCUMENTS:
        text = "\n".join(code_lines(document)).replace("\\\n", " ")
        for line in re.findall(r"^\s*(?:\$ )?agentcore-rl (.+)$", text, re.MULTILINE):
            words = line.split("#")[0].split()
            command: click.Command = cli
            context = click.Context(cli)
            while words and isinstance(command, click.Group) and not words[0].startswith("-"):
                found = command.get_command(context, words[0])
                assert found is not None, f"{document.name}: agentcore-rl {line}"
                command, words = found, words[1:]
            known = {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}
            for word in words:
                name = word.split("=")[0]
                if re.fullmatch(r"--[a-z][a-z0-9-]*", name) and name != "--help":
                    assert name in known, f"{document.name}: agentcore-rl {line}: no option {name}"


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
    "AWS": "--model-provider agentcore/agentcore.json agentcore/.cli/deployed-state.json",
    "LangChain": "use_responses_api",
    "Node": "--import",
    "SageMaker's kinds of tokens": "billed_prefill_tokens billed_sample_tokens billed_training_tokens",
    "the reader": "gateway_client some_metric hello.py plan.toml prices.json shop/train.toml RLLM_DIR",
}
MOVED = ("migration.md", "CHANGELOG.md")  # pages that name what other versions and products have
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
NAME = re.compile(r"(?<![\w./-])[A-Za-z]+(?:_[A-Za-z0-9]+)+(?![\w./-])")
FILE = re.compile(r"(?<![\w/.{}*-])[\w-]+(?:/[\w.-]+)*\.(?:py|md|sh|toml|ya?ml|json|jsonl)(?![\w.])")


def prose(document: Path) -> str:
    return re.sub(r"^( *)```.*?^\1```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def code() -> str:
    """What is in the repository besides the documents and the tests."""
    kinds = (".py", ".toml", ".yaml", ".yml", ".sh", ".html", ".js", "")
    files = [f for f in listed_files() if f.suffix in kinds and f.relative_to(ROOT).parts[0] not in ("docs", "tests")]
    return "\n".join(f.read_text(errors="ignore") for f in files if f.stat().st_size < 400_000)


def test_every_option_name_and_file_in_the_prose_is_in_the_code(code: str) -> None:
    from agentcore_rl_toolkit.app.settings import PREFIX, AgentSettings

    others = {word for words in OTHER_PRODUCTS.values() for word in words.split()}
    names = {*re.findall(r"\w+", code), *(PREFIX + name.upper() for name in AgentSettings.__dataclass_fields__)}
    names |= {file.stem for file in listed_files()}
    files = {file.name for file in listed_files()}
    options = set(OPTION.findall(code))
    wrong = []
    for document in (d for d in DOCUMENTS if d.name not in MOVED and d.parts[len(ROOT.parts)] in ("README.md", "docs")):
        places = (ROOT, ROOT / "docs", document.parent, ROOT / "src" / "agentcore_rl_toolkit", ROOT / "examples")
        for span in SPAN.findall(prose(document)):
            found = [option for option in OPTION.findall(span) if option not in options]
            found += [name for name in NAME.findall(span) if name not in names]
            for file in FILE.findall(span):
                named = file in files or file.removeprefix("output_dir/") in code
                found += [] if named or any((place / file).exists() for place in places) else [file]
            wrong += [f"{document.name}: {word} in `{span}`" for word in found if word not in others]
    assert not wrong, "\n".join(wrong)


def test_every_command_in_the_prose_exists() -> None:
    """A span such as `gateway serve --set NAME=VALUE` names a command, its group and its options, with `agentcore-rl` or not."""
    from agentcore_rl_toolkit.cli.main import cli

    context = click.Context(cli)
    wrong = []
    for document in (d for d in DOCUMENTS if d.name not in (*MOVED, "cli.md")):
        for span in SPAN.findall(prose(document)):
            full, words = span.startswith("agentcore-rl "), span.removeprefix("agentcore-rl ").split()
            command = cli.get_command(context, words[0]) if words else None
            if command is None or not (
                full or isinstance(command, click.Group) or any(w.startswith("--") for w in words)
            ):
                if full and words and re.fullmatch("[a-z-]+", words[0]):
                    wrong.append(f"{document.name}: `{span}`")
                continue
            for word in words[1:]:
                if isinstance(command, click.Group):
                    inner = command.get_command(context, word)
                    if inner is None:
                        wrong.append(f"{document.name}: `{span}`")
                        break
                    command = inner
                elif found := OPTION.match(word):
                    known = {name for p in command.params for name in [*p.opts, *p.secondary_opts]} | {"--help"}
                    wrong += [] if found[0] in known else [f"{document.name}: {found[0]} in `{span}`"]
    assert not wrong, "\n".join(wrong)


def test_the_defaults_in_the_prose_are_those_of_the_code() -> None:
    from agentcore_rl_toolkit.backends.llm_judge import JudgeSettings
    from agentcore_rl_toolkit.backends.rllm import RllmConfig
    from agentcore_rl_toolkit.backends.rollout_settings import LimitSettings
    from agentcore_rl_toolkit.backends.slime import SlimeRunner
    from agentcore_rl_toolkit.backends.verl.settings import AgentCoreConfig
    from agentcore_rl_toolkit.cli.training.settings import LocalRun
    from agentcore_rl_toolkit.gateway import Limits
    from agentcore_rl_toolkit.runtime.config import TimeLimits

    def of(settings: Any, name: str) -> Any:
        return settings.DEFAULTS.get(name, settings.known()[name][1].default)

    usual, slime, gateway, runtime = LimitSettings(), SlimeRunner, Limits(), TimeLimits()
    at_once = (of(LocalRun, "max_concurrent"), of(slime, "max_concurrent"), of(AgentCoreConfig, "max_concurrent"))
    times = [of(s, "rollout_timeout_s") for s in (LocalRun, RllmConfig, AgentCoreConfig)]
    facts = {
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
        "docs/runtime.md": (f"{runtime.idle_timeout_s:g} s without work", f"{runtime.max_lifetime_s:,.0f} s in all"),
    }
    for page, texts in facts.items():
        for text in texts:
            assert text in " ".join((ROOT / page).read_text().split()), f"{page}: {text}"


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
