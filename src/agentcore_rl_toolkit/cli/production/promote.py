"""`agentcore-rl promote`: a trained model into production, and a deployed agent onto the model."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...errors import ConfigError
from ..models import model_folder
from ..options import as_json, shortened
from ..output.commands import nearby, program
from ..output.terminal import visible

if TYPE_CHECKING:
    from ...deploy.calls import Calls
    from ...deploy.models.facts import ModelFacts

FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)
NOT_TAKEN = {
    "sagemaker": "out",
    "bedrock": "out instance",
    "folder": "name instance agent bundle rows roll_back remove",
}
# vLLM's name of each of our parsers.
VLLM_PARSERS = {
    "deepseek": "deepseek_v3",
    "glm": "glm45",
    "harmony": "openai",
    "hermes": "hermes",
    "llama": "llama3_json",
    "qwen_coder": "qwen3_coder",
}


@click.command()
@click.argument("model", metavar="RUN|MODEL")
@click.option(
    "--to",
    type=click.Choice(["sagemaker", "bedrock", "folder"]),
    default="sagemaker",
    show_default=True,
    help="The service that runs the model, or only the folder.",
)
@click.option("--name", help="Name of the model in production. [default: the name of the run]")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Type of the weights.",
)
@click.option(
    "--out",
    type=FOLDER,
    help="With --to folder: the folder. [default: promoted-DTYPE in the run, MODEL-promoted-DTYPE]",
)
@click.option("--bucket", envvar="AGENTCORE_RL_MODEL_BUCKET", show_envvar=True, help="Bucket for the weights.")
@click.option("--instance", metavar="TYPE", help="Instance type of SageMaker. [default: the smallest that fits]")
@click.option(
    "--tool-parser",
    metavar="NAME",
    help="vLLM's parser of tool calls; none: the agent calls no tools. [default: depends on the chat template]",
)
@click.option("--agent", metavar="ARN", help="A deployed agent, which then calls the model.")
@click.option("--endpoint", default="DEFAULT", show_default=True, help="The endpoint of the agent that uses the model.")
@click.option(
    "--bundle",
    metavar="NAME",
    help="Write the address of the model into this configuration bundle instead of the agent.",
)
@click.option("--rows", type=FILE, help="Send the first three rows of this file to the agent, to test it.")
@click.option("--roll-back", metavar="VERSION", help="With --agent: only let the agent use this version again.")
@click.option("--region", help="AWS region. [default: the environment's or profile's]")
@click.option("--dry-run", is_flag=True, help="Write the folder, print the changes on AWS, and make none of them.")
@click.option("--remove", is_flag=True, help="Remove what this command created for the model, except the bucket.")
@as_json
def command(model: str, to: str, **options: Any) -> None:
    """Put a trained model into production, on a SageMaker endpoint with vLLM or as an import into Bedrock.

    The command checks the model before anything costs money. It uploads the weights, creates or updates the endpoint, sends it a
    question, and compares its logprobs with those of the run. With --agent, a new version of the agent gets the address of the
    model, which `app.model()` reads. The role of the agent gets the right to call the model.

    If the command is interrupted, repeat it. The SageMaker endpoint is billed until --remove.

    --to folder only writes the folder, for vLLM or another server.

    \b
    Example:
        agentcore-rl promote runs/refund --to folder
        agentcore-rl promote runs/refund --bucket my-models --agent ARN --rows eval.jsonl
        agentcore-rl promote runs/refund --bucket my-models --agent ARN --remove
    """
    from ...deploy.calls import Calls

    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if not options["as_json"]:
            click.echo(visible(line))

    if wrong := [name for name in NOT_TAKEN[to].split() if options[name]]:
        raise ConfigError(f"--to {to} takes no --{wrong[0].replace('_', '-')}")
    if to == "folder":
        folder = _folder(model_folder(model), options)
        facts = _read(folder, options["tool_parser"])
        flags = f" --enable-auto-tool-choice --tool-call-parser {facts.tool_parser}" if facts.tool_parser else ""
        result = {"folder": str(folder), "command": f"vllm serve {shlex.quote(str(folder))}{flags}"}
        say(f"{nearby(folder)}: {facts.size}")
        say(f"Serve it with:  {result['command']}")
    else:
        result = _promote(model, to, options, Calls(region=options["region"], rehearse=options["dry_run"], say=say))
    if options["as_json"]:
        click.echo(json.dumps({**result, "steps": lines}, indent=2))


def _promote(given: str, to: str, options: Mapping[str, Any], calls: Calls) -> dict[str, Any]:
    from ...deploy import iam
    from ...deploy.models.agents import AgentSwitch, ConfigurationBundle
    from ...deploy.models.bedrock import ImportedModel
    from ...deploy.models.sagemaker import SageMakerEndpoint
    from . import proof

    arn, bucket, endpoint, back = (options[name] for name in ("agent", "bucket", "endpoint", "roll_back"))
    if arn is None and (options["bundle"] or options["rows"] or back or endpoint != "DEFAULT"):
        raise ConfigError("--bundle, --rows, --endpoint and --roll-back need --agent ARN")
    if back and (options["bundle"] or options["remove"]):
        raise ConfigError("--roll-back takes neither --bundle nor --remove")
    agent = None if arn is None else AgentSwitch(arn, endpoint, calls)
    if agent is not None and back is not None:
        version = agent.roll_back(back)
        calls.say(f"the agent's endpoint {endpoint} uses version {version}")
        return {"agent": arn, "version": version}
    if bucket is None:
        raise ConfigError("--bucket NAME is missing: the weights are uploaded there")
    name = _name(Path(given).resolve(), options["name"])
    rights = f"{to}-{name}"  # no other model or bundle has this name
    host = (
        SageMakerEndpoint(name, bucket, calls, options["instance"])
        if to == "sagemaker"
        else ImportedModel(name, bucket, calls)
    )
    bundle = None if options["bundle"] is None else ConfigurationBundle(options["bundle"], calls)
    if options["remove"]:
        if agent is not None:
            agent.leave(host.addresses())
            agent.forbid(rights)
            if bundle is not None and bundle.remove(arn, host.addresses()):
                agent.forbid(bundle.policy)
        host.remove()
        return {"removed": name}

    model = model_folder(given)
    folder = _folder(model, options)
    facts = _read(folder, options["tool_parser"], parsed=to == "sagemaker")
    calls.say(f"{facts.size}, {host.check(facts)}")
    host.up(facts)
    result: dict[str, Any] = {"name": name, "folder": str(folder), **host.address}
    if not calls.rehearse:
        result |= proof.of_model(host, model, calls)
    words = f"{program()} promote {shlex.quote(str(model))} --to {to} --name {name} --region {calls.region}"
    baggage = None
    if agent is not None:
        words += f" --agent {arn} --endpoint {endpoint}"
        agent.allow(rights, host.rights)
        if bundle is not None:
            words += f" --bundle {bundle.name}"
            result |= bundle.put(arn, host.address)
            agent.allow(bundle.policy, iam.bundle_user(result["bundle"]))
            of = "aws.agentcore.configbundle"
            baggage = f"{of}_arn={result['bundle']},{of}_version={result['version']}"
            calls.say(f"Calls with this header use the model:  baggage: {baggage}")
        else:
            before, version = agent.use(host.address)
            result |= {"agent": arn, "version": version, "version_before": before}
            if before is not None:
                calls.say(f"Roll back with:  {words} --roll-back {before}")
    calls.say(f"Remove it with:  {words} --bucket {bucket} --remove")
    if options["rows"] is not None and not calls.rehearse:
        proof.of_agent(options["rows"], arn, endpoint, baggage, calls)
    return result


def _name(model: Path, name: str | None) -> str:
    run = model.parent.name if model.name == "policy" else model.name
    name = name or shortened(re.sub(r"[^A-Za-z0-9]+", "-", run).strip("-"), 36, "-")
    name = name.lower()  # SageMaker may not distinguish case
    if not re.fullmatch(r"(?=.{1,36}$)[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ConfigError(
            f"{name!r} cannot be the name of a model in production: give a --name of at most 36 letters, digits and hyphens"
        )
    return name


def _folder(model: Path, options: Mapping[str, Any]) -> Path:
    import shutil

    from ...weights import copy_folder

    target: Path | None = options["out"]
    if target is None:
        name = f"promoted-{options['dtype']}"  # inside a run's folder, or next to the model and with its name
        target = model.with_name(name if model.name == "policy" else f"{model.name}-{name}")
        shutil.rmtree(target, ignore_errors=True)
    return copy_folder(model, target, options["dtype"])


def _read(folder: Path, parser: str | None, *, parsed: bool = True) -> ModelFacts:
    """Read the model, and render a message with its template. If ``parsed``, find vLLM's parser of its calls.

    Raises: ConfigError.
    """
    from ...deploy.models.facts import read_model
    from ...messages.render import Renderer
    from ...messages.render.parsers import grammar_of

    facts = read_model(folder)
    Renderer.from_path(folder)
    if parser == "none":
        return dataclasses.replace(facts, takes_tools=False)
    if parsed and parser is None and facts.takes_tools:
        grammar = grammar_of((folder / "chat_template.jinja").read_text()).name
        if (parser := VLLM_PARSERS.get(grammar)) is None:
            raise ConfigError(
                f"no parser of vLLM is known for this chat template ({grammar}): give one with --tool-parser, or give "
                "--tool-parser none if the agent calls no tools"
            )
    return dataclasses.replace(facts, tool_parser=parser)
