"""`agentcore-rl promote`: a trained model onto an endpoint, and a deployed agent onto the model."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...errors import ConfigError
from ..models import Model
from ..options import as_json
from ..output.commands import nearby, program
from ..output.terminal import visible

if TYPE_CHECKING:
    from ...deploy.calls import Calls
    from ...deploy.hosting import HostingSettings
    from ...deploy.model import ModelFacts

FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)
RUNTIME_URL = "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME"
ROWS = 3  # that are sent through the agent
ANSWER_S = 300.0
# vLLM's names of the parsers of ours.
VLLM_PARSERS = {
    "deepseek": "deepseek_v3",
    "glm": "glm45",
    "harmony": "openai",
    "hermes": "hermes",
    "llama": "llama3_json",
    "qwen_coder": "qwen3_coder",
}


@click.command()
@click.argument("model", type=Model(), metavar="RUN|MODEL")
@click.option(
    "--to", type=click.Choice(["sagemaker", "folder"]), default="sagemaker", show_default=True, help="Where to."
)
@click.option("--name", help="Name of the endpoint. [default: the run's]")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Type of the weights.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder. [default: promoted-DTYPE beside the model]",
)
@click.option("--bucket", envvar="AGENTCORE_RL_MODEL_BUCKET", show_envvar=True, help="Bucket of the weights.")
@click.option("--instance", metavar="TYPE", help="Instance. [default: the smallest that fits]")
@click.option("--role", metavar="ARN", help="The endpoint's role. [default: one is made with least rights]")
@click.option("--image", metavar="URI", help="Container. [default: AWS's image of vLLM]")
@click.option(
    "--tool-parser", metavar="NAME", help="vLLM's parser of tool calls; none: no tools. [default: by the template]"
)
@click.option("--agent", metavar="ARN", help="Let this deployed agent call the model.")
@click.option("--endpoint", default="DEFAULT", show_default=True, help="The agent's endpoint.")
@click.option(
    "--rows",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Send rows of this file through the agent.",
)
@click.option("--roll-back", metavar="VERSION", help="Let the agent's endpoint lead to this earlier version again.")
@click.option("--region", help="AWS region. [default: the environment's or profile's]")
@click.option("--dry-run", is_flag=True, help="Print every call; change nothing.")
@click.option("--remove", is_flag=True, help="Remove the endpoint and all that was made for it.")
@as_json
def command(model: Path, to: str, **options: Any) -> None:
    """Put a trained model into production: a SageMaker endpoint with vLLM, and a deployed agent that calls it.

    The command checks the model before anything costs money, uploads the weights, creates or updates the endpoint, and asks it a
    question. With --agent, the agent's next version gets AGENTCORE_RL_MODEL_URL, which `app.model()` reads, and its role gets the
    right to call the endpoint. An interrupted command can be repeated: it continues.

    --to folder writes the folder only, for vLLM or another server.

    \b
    Example:
        agentcore-rl promote runs/refund --to folder
        agentcore-rl promote runs/refund --bucket my-models --agent ARN --rows eval.jsonl
        agentcore-rl promote runs/refund --bucket my-models --remove
    """
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if not options["as_json"]:
            click.echo(visible(line))

    if to == "folder":
        folder = _folder(model, options)
        facts = _check(folder)
        found = {"folder": str(folder), "command": f"vllm serve {shlex.quote(str(folder))}{_flags(facts, options)}"}
        say(f"{nearby(folder)}: {facts.architecture}, {facts.bytes / 10**9:.2f} GB in {facts.dtype}")
        say(f"Serve it with:  {found['command']}")
        _print_json(options, found, lines)
        return
    from ...deploy.calls import Calls
    from ...deploy.hosting import ModelHosting

    if options["roll_back"] is not None:
        calls = Calls(region=options["region"], rehearse=options["dry_run"], say=say)
        _roll_back(calls, options, say)
        return
    if options["bucket"] is None:
        raise ConfigError("--bucket NAME is missing: the weights are uploaded there")
    if options["remove"]:
        calls = Calls(region=options["region"], rehearse=options["dry_run"], say=say)
        ModelHosting(_settings(model, options), calls, say).remove()
        return
    folder = _folder(model, options)
    facts = _check(folder)
    calls = Calls(region=options["region"], rehearse=options["dry_run"], say=say)
    settings = _settings(model, options, facts)
    price = _price(settings.instance, calls)
    say(f"{facts.architecture}, {facts.bytes / 10**9:.2f} GB in {facts.dtype}, on {settings.instance}: {price}")
    hosting = ModelHosting(settings, calls, say)
    hosting.up(facts)
    url = _url(calls, settings.name)
    if not options["dry_run"]:
        say(f"the model answered: {_ask(url, calls)}")
    result: dict[str, Any] = {"endpoint": settings.name, "url": url, "folder": str(folder)}
    if options["agent"] is not None:
        result |= _switch(calls, options, url, hosting.endpoint_arn, say)
    words = f"{program()} promote {shlex.quote(str(model))} --bucket {options['bucket']} --name {settings.name}"
    say(f"Remove it with:  {words} --remove")
    _print_json(options, result, lines)


def _settings(model: Path, options: dict[str, Any], facts: ModelFacts | None = None) -> HostingSettings:
    """Raises: ConfigError."""
    from ...deploy.hosting import HostingSettings
    from ...deploy.model import instance_for

    run = model.parent.name if model.name == "policy" else model.name
    name = options["name"] or re.sub(r"[^A-Za-z0-9]+", "-", run).strip("-")[:40].rstrip("-")
    if not re.fullmatch(r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,39}", name) or len(name) > 40:
        raise ConfigError(
            f"{name!r} is not a name of an endpoint: letters, digits and single hyphens, at most 40. Use --name"
        )
    instance, gpus = ("", 1) if facts is None else instance_for(facts, options["instance"])
    return HostingSettings(
        name=name,
        bucket=options["bucket"],
        instance=instance,
        gpus=gpus,
        tool_parser=None if facts is None else _tool_parser(facts, options["tool_parser"]),
        role=options["role"],
        image=options["image"],
    )


def _folder(model: Path, options: dict[str, Any]) -> Path:
    """Return the folder with the weights in the wanted type. One that was written from the same weights is used again."""
    from ...weights import copy_folder

    target: Path = options["out"] or model.parent / f"promoted-{options['dtype']}"
    written = max((file.stat().st_mtime for file in target.glob("*.safetensors")), default=0.0)
    trained = max((file.stat().st_mtime for file in model.glob("*.safetensors")), default=0.0)
    if written >= trained > 0 and options["out"] is None:
        return target
    if target.exists() and options["out"] is None:
        import shutil

        shutil.rmtree(target)
    return copy_folder(model, target, options["dtype"])


def _check(folder: Path) -> ModelFacts:
    """Read the model, and render a message with its template. Raises: ConfigError."""
    from ...deploy.model import read_model
    from ...messages.render import Renderer

    facts = read_model(folder)
    Renderer.from_path(folder)
    return facts


def _tool_parser(facts: ModelFacts, wanted: str | None) -> str | None:
    """Return the name of vLLM's parser. None: the model takes no tools. Raises: ConfigError if the template is not known."""
    from ...messages.render.parsers import grammar_of

    if wanted is not None or not facts.takes_tools:
        return None if wanted == "none" else wanted
    grammar = grammar_of((facts.folder / "chat_template.jinja").read_text())
    if grammar.name not in VLLM_PARSERS:
        raise ConfigError(
            f"no parser of vLLM is known for this chat template ({grammar.name}): name one with --tool-parser, or give "
            "--tool-parser none if the agent calls no tools"
        )
    return VLLM_PARSERS[grammar.name]


def _flags(facts: ModelFacts, options: dict[str, Any]) -> str:
    parser = _tool_parser(facts, options["tool_parser"])
    return "" if parser is None else f" --enable-auto-tool-choice --tool-call-parser {parser}"


def _url(calls: Calls, name: str) -> str:
    base = os.environ.get(RUNTIME_URL) or f"https://runtime.sagemaker.{calls.region}.amazonaws.com"
    return f"{base.rstrip('/')}/endpoints/{name}/openai/v1"


def _ask(url: str, calls: Calls) -> str:
    """Ask the endpoint a question. Returns its answer. Raises: ConfigError without one."""
    import httpx

    from ...app.model import bearer_token

    assert calls.region is not None
    body = {"model": "", "messages": [{"role": "user", "content": "What is 3 + 4?"}], "max_tokens": 32}
    headers = {"authorization": f"Bearer {bearer_token('sagemaker', calls.region)}"}
    try:
        reply = httpx.post(f"{url}/chat/completions", json=body, headers=headers, timeout=ANSWER_S)
        reply.raise_for_status()
        message = reply.json()["choices"][0]["message"]
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as e:
        text = e.response.text[:500] if isinstance(e, httpx.HTTPStatusError) else ""
        raise ConfigError(f"the endpoint is in service, and does not answer at {url}: {e} {text}".rstrip()) from e
    return json.dumps(message.get("content") or message.get("tool_calls"))[:200]


def _switch(
    calls: Calls, options: dict[str, Any], url: str, endpoint_arn: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Let the agent call the model, and send rows through it."""
    from ...deploy.switch import AgentSwitch

    switch = AgentSwitch(options["agent"], options["endpoint"], calls, say)
    before, version = switch.use({"AGENTCORE_RL_MODEL_URL": url}, endpoint_arn)
    if options["rows"] is not None and not options["dry_run"]:
        _send_rows(calls, options, say)
    again = f"{program()} promote {options['name'] or '.'} --agent {options['agent']} --endpoint {options['endpoint']}"
    say(f"Roll back with:  {again} --roll-back {before}")
    return {"agent": options["agent"], "version": version, "version_before": before}


def _send_rows(calls: Calls, options: dict[str, Any], say: Callable[[str], None]) -> None:
    """Call the agent as its users do, with the first rows. Raises: ConfigError if it refuses one."""
    from ...client.evaluation import read_rows
    from ...contract import new_session_id

    for row in read_rows(options["rows"])[:ROWS]:
        reply = calls(
            "bedrock-agentcore",
            "InvokeAgentRuntime",
            agentRuntimeArn=options["agent"],
            qualifier=options["endpoint"],
            runtimeSessionId=new_session_id(),
            payload=json.dumps(row.payload).encode(),
        )
        text = reply["response"].read().decode("utf-8", "replace")
        say(f"{row.input_id}: {reply.get('statusCode', 200)} {text[:200]}")
        if reply.get("statusCode", 200) >= 400:
            raise ConfigError(f"the agent refused {row.input_id}: {text[:500]}")


def _roll_back(calls: Calls, options: dict[str, Any], say: Callable[[str], None]) -> None:
    from ...deploy.switch import AgentSwitch

    if options["agent"] is None:
        raise ConfigError("--roll-back needs --agent ARN")
    version = AgentSwitch(options["agent"], options["endpoint"], calls, say).roll_back(options["roll_back"])
    say(f"the agent's endpoint {options['endpoint']} leads to version {version}")


def _price(instance: str, calls: Calls) -> str:
    """Return the price per hour for people. Reads AWS's price list, which may not be open to this user."""
    from ...deploy.calls import Calls

    wanted = {"instanceName": instance, "component": "Hosting", "regionCode": str(calls.region)}
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
    try:
        prices = Calls(region="us-east-1", rehearse=calls.rehearse, say=lambda line: None)  # the list of all regions
        listed = (prices("pricing", "GetProducts", ServiceCode="AmazonSageMaker", Filters=filters) or {})["PriceList"]
        (terms,) = json.loads(listed[0])["terms"]["OnDemand"].values()
        (dimension,) = terms["priceDimensions"].values()
        return f"${float(dimension['pricePerUnit']['USD']):.2f} per hour"
    except (ConfigError, LookupError, ValueError):
        return "price per hour unknown"


def _print_json(options: dict[str, Any], found: dict[str, Any], lines: list[str]) -> None:
    if options["as_json"]:
        click.echo(json.dumps({**found, "steps": lines}, indent=2))
