"""Runtime, gateway and policy as one stack: they start and end together, and other commands in the same folder find them.

A process that starts a stack with `publish` writes `.agentcore-rl/up.json` into the folder, readable by this user only, and
locks the file next to it for as long as it runs. `Stack.running` reads the file only while the lock is held.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import secrets
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..._servers.child import Child, cause_of
from ..._servers.process import write_private
from ...contract import AS_IS
from ...errors import AgentCoreRLError, ConfigError, LocalRuntimeError
from ...isolation.project import Project
from ...store.remote import find_region
from ..agents.agentcore_project import find_runtime, variables_of
from ..options import session_arguments
from ..output.commands import nearby
from ..output.terminal import WaitReport, visible
from ..servers.vllm import MODEL_ID, context_of
from .services import READY_DEADLINE_S, Services

FOLDER = ".agentcore-rl"
AGENT_NAME = "agent"
# Names under which `start` reports slow sessions, the build of an environment, and a model without tools.
SESSIONS, ENVIRONMENT, MODEL = "sessions", "environment", "model"
REGION = "us-west-2"
FORCED_TOOLS = ("constrain", "wish", "refuse")
VLLM_READY_S = 900.0  # its import takes six minutes on two cores without compiled files
# Busy-waiting OpenMP threads cost two to three times the CPU on a machine whose cores are shared by all parts.
QUIET = {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
# Our clients find the local runtime's key by themselves. boto3 only needs any credentials.
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """The addresses of the parts of a running stack."""

    pid: int
    agent: str  # its file
    agent_arn: str
    store: str
    model: str | None  # the model's folder; None: the built-in policy
    runtime_url: str
    gateway_url: str  # several addresses have commas between them
    gateway_admin_key: str = dataclasses.field(repr=False)
    policy_url: str
    engine: str = "policy"  # the kind of engine at policy_url
    credentials_file: str | None = None  # the runtime's, for other AWS clients
    digest: str = ""  # digest of the agent's files as loaded
    forced_tools: str = FORCED_TOOLS[0]  # the gateway's settings
    history: str = "sampled"
    score: str | None = None  # the scorer of its rollouts

    def environment(self) -> dict[str, str]:
        """Return the variables that other programs need to use the stack."""
        return {
            "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE": self.runtime_url,
            "AWS_ENDPOINT_URL_BEDROCK_AGENTCORE_CONTROL": self.runtime_url,
            "AGENTCORE_AGENT_ARN": self.agent_arn,
            "AGENTCORE_S3_BUCKET": self.store,
            "AGENTCORE_RL_GATEWAY_URL": self.gateway_url,
            "AGENTCORE_RL_GATEWAY_ADMIN_KEY": self.gateway_admin_key,
            **({"AWS_SHARED_CREDENTIALS_FILE": self.credentials_file} if self.credentials_file else {}),
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
        }

    @classmethod
    def running(cls, folder: Path | None = None) -> Stack | None:
        """Return the stack that `agentcore-rl up` runs in this folder, or None."""
        place = (folder or Path.cwd()) / FOLDER
        try:
            lock = os.open(place / "up.lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            with contextlib.suppress(OSError, ValueError, TypeError):
                return cls(**json.loads((place / "up.json").read_text()))
        finally:
            os.close(lock)
        return None

    def has(self, agent: Path | None, wanted: Mapping[str, Any]) -> bool:
        """Return True if it runs this agent's file (None: any), with these arguments of `start`. The built-in model is None."""
        names = ("model", "engine", "history", *(["forced_tools"] if wanted.get("forced_tools") else []))
        same = {name: None if wanted[name] is None else str(wanted[name]) for name in names if name in wanted}
        return agent in (None, Path(self.agent)) and all(getattr(self, name) == value for name, value in same.items())

    def renewed(self) -> Stack:
        """Return the same stack, with its agent loaded again if its files have changed. Raises: LocalRuntimeError."""
        agent = Path(self.agent)
        now = dataclasses.replace(self, digest=Project.of(agent).digest())
        if now == self:
            return self
        from ...runtime.agents import environments
        from ...runtime.remote import RuntimeView

        click.echo(
            visible(f"{nearby(agent)} or what it imports has changed: `agentcore-rl up` loads it again"), err=True
        )
        waiting = WaitReport(f"loading {agent.name}")
        if environments.fits_here(agent):
            RuntimeView(self.runtime_url).reload(AGENT_NAME, on_wait=waiting)
        else:
            RuntimeView(self.runtime_url).deploy(agent, AGENT_NAME, {AS_IS: "1"}, on_wait=waiting)
        write_private(Path.cwd() / FOLDER / "up.json", now.as_json())
        return now

    def trained(self) -> contextlib.AbstractContextManager[None]:
        """Let one process put weights into the engine until the block ends. Raises: ConfigError if another one does."""
        if self.pid == os.getpid():
            return contextlib.nullcontext()
        return _lock(
            Path.cwd() / FOLDER / "up.env",
            "another training puts its weights into the engine of `agentcore-rl up` in this folder: wait until it ends, or train "
            "in another folder",
        )

    @property
    def tokenizer(self) -> Path:
        """The folder with the tokenizer of its model."""
        return Path(self.model) if self.model else Path(__file__).resolve().parents[2] / "policy" / "weights"

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @contextlib.contextmanager
    def publish(self, folder: Path) -> Iterator[str]:
        """Let other commands find this stack until the block ends. Yield the text of `up.env`, to `source` in a shell."""
        place = folder / FOLDER
        place.mkdir(mode=0o700, exist_ok=True)
        with _lock(place / "up.lock", "another `agentcore-rl up` runs in this folder: stop it, or use another folder"):
            shell = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self.environment().items())
            files = {"up.json": self.as_json(), "up.env": shell}
            for name, text in files.items():
                write_private(place / name, text)
            try:
                yield shell
            finally:
                for name in files:
                    (place / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(file: Path, refusal: str) -> Iterator[None]:
    """Lock a file until the block ends. Raises: ConfigError with ``refusal`` when another process has it."""
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(refusal) from None
        yield
    finally:
        os.close(lock)


def use_local_credentials() -> None:
    """Give boto3 credentials if the environment has none."""
    for name, value in {**_CREDENTIALS, "AWS_REGION": find_region() or REGION}.items():
        os.environ.setdefault(name, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Upstream:
    """An engine: its address and kind. ``relayed``: the gateway passes messages on as they are."""

    url: str
    engine: str
    relayed: bool = False


def say_what_is_slow(name: str, text: str) -> None:
    """Print the services that take time: a ``report`` of `start`."""
    if name in (SESSIONS, ENVIRONMENT, MODEL):
        click.echo(visible(f"note: {name}: {text}"), err=True)


def start(
    services: Services,
    agent: Path,
    *,
    folder: Path,
    admin_key: str,
    model: Path | None = None,
    engine: str = "policy",
    dtype: str | None = None,
    upstream: Upstream | None = None,
    without_model: bool = False,
    own_environment: bool = False,
    gateways: int = 1,
    forced_tools: str | None = None,
    history: str = "sampled",
    session_env: Sequence[str] = (),
    runtime_options: Sequence[str] = (),
    score: str | None = None,
    store: str | None = None,
    report: Callable[[str, str], None] = say_what_is_slow,
) -> Stack:
    """Start policy, runtime and gateway, and give the agent to the runtime. Blocks.

    ``services`` must have been made with ``QUIET`` and the gateway's admin key in its environment. The agent runs in this
    environment if that has the requirements of the agent's folder, otherwise (with ``own_environment``: always) in a new one.
    Turns and sessions' logs go below ``folder``, and records into ``store`` (a file URL; None: below it, too). ``engine`` serves
    the model: "policy", in ``dtype`` (None: its own choice), or "vllm"; an ``upstream`` takes its place, and ``without_model``
    there is neither engine nor gateway. ``forced_tools`` and ``history`` are `GatewayConfig`'s. ``score`` is the scorer of its
    rollouts. ``session_env`` are the sessions' variables, as K=V, or K for the value that it has here; ``runtime_options`` are
    further ones of `runtime serve`. ``report(name, url)`` is called for each part that is ready.
    Raises: ServiceError, LocalRuntimeError, ConfigError.
    """
    from ...runtime.agents import environments
    from ...runtime.remote import RuntimeView
    from ...runtime.wire import HANDED, parse_environment

    variables = {AS_IS: "1", **variables_of(agent), **parse_environment(session_env)}
    if model is not None and not without_model:
        from ...messages.render import Renderer, unread_calls
        from ..doctor.template import NO_TOOLS

        renderer = Renderer.from_path(model)
        if (problem := unread_calls(renderer) if renderer.facts.tools_shown else NO_TOOLS) is not None:
            report(MODEL, problem)
    store = store or f"file://{folder / 'store'}"
    Path(store.removeprefix("file://")).mkdir(parents=True, exist_ok=True)
    policy = launch_engine(services, model, engine, dtype) if upstream is None and not without_model else None
    here = not own_environment and environments.fits_here(agent)
    words = ["runtime", "serve", "--state-dir", str(folder / "sessions"), "--store", store]
    words += ["--agent", f"{AGENT_NAME}={agent}"] if here else []
    runtime = services.launch(
        "runtime",
        [*words, *runtime_options],
        doing=f"loading {agent}" if here else "",
        env={HANDED: json.dumps(variables)},
    )
    if policy is not None:
        ready = services.wait_ready(policy, VLLM_READY_S if engine == "vllm" else READY_DEADLINE_S)
        upstream = Upstream(url=ready.url, engine=engine)
    started: list[Child] = []
    if upstream is not None:
        report("policy", upstream.url)
        names = ["gateway"] if gateways == 1 else [f"gateway {number}" for number in range(gateways)]
        for name in names:
            turns = folder / name.replace("gateway", "turns").replace(" ", "-")
            chosen = {"forced_tools": forced_tools, "history": None if history == "sampled" else history}
            settings = [word for key, value in chosen.items() if value for word in ("--set", f"{key}={value}")]
            started.append(services.launch(name, [*gateway_words(upstream, turns, model), *settings]))
    services.wait_ready(runtime)
    report("runtime", runtime.url)
    use_local_credentials()
    if here:
        arn = str(runtime.ready["agents"][AGENT_NAME])
    else:
        file = Project.of(agent).dependencies
        report(ENVIRONMENT, f"the agent gets a separate environment with the packages of {file}")
        waiting = WaitReport(f"building the environment of {file}, or loading {agent.name} in it")
        arn = RuntimeView(runtime.url).deploy(agent, AGENT_NAME, {AS_IS: "1"}, on_wait=waiting)
    digest = Project.of(agent).digest()
    for gateway in started:
        services.wait_ready(gateway)
        report("gateway", gateway.url)
    if runtime.ready["isolation"] == "none":
        report(
            SESSIONS,
            "they run without a sandbox on this machine, so a policy's mistakes can change your files (docs/security.md)",
        )
    slow = _slow_start(RuntimeView(runtime.url))
    if slow is not None:
        report(SESSIONS, slow)
    return Stack(
        pid=os.getpid(),
        agent=str(agent),
        agent_arn=arn,
        store=store,
        model=str(model) if model else None,
        runtime_url=runtime.url,
        gateway_url=",".join(gateway.url for gateway in started),
        gateway_admin_key=admin_key,
        policy_url=upstream.url if upstream is not None else "",
        engine=engine,
        credentials_file=runtime.ready.get("credentials_file"),
        digest=digest,
        forced_tools=forced_tools or FORCED_TOOLS[0],
        history=history,
        score=score,
    )


def launch_engine(services: Services, model: Path | None, engine: str, dtype: str | None) -> Child:
    if engine == "vllm":
        words = ["policy", "vllm", *(["--model", str(model)] if model else [])]
        doing = "loading the model and answering its first request: a minute or two"
        return services.launch("vLLM", words, doing=doing)
    words = ["policy", "serve", "--threads", str(max(1, (os.cpu_count() or 2) // 2))]
    words += [*(["--dtype", dtype] if dtype else []), *(["--model", str(model)] if model else [])]
    return services.launch("policy server", words, doing=f"loading {model or 'the built-in policy'}")


def gateway_words(upstream: Upstream, turns: Path, model: Path | None) -> list[str]:
    """Return the command of a gateway for this server. The gateway tokenizes: each turn continues the tokens of the last turn."""
    from ...policy.model import WEIGHTS_DIR

    words = ["gateway", "serve", "--upstream", upstream.url, "--engine", upstream.engine, "--store", str(turns)]
    if upstream.relayed:
        return words
    folder = model or WEIGHTS_DIR
    context = context_of(folder)
    words += ["--model", str(folder), "--model-id", MODEL_ID]  # agents as they are name another model
    return [*words, *(["--set", f"context_tokens={context}"] if context is not None else [])]


@contextlib.contextmanager
def own(agent: Path, *, folder: Path, **wanted: Any) -> Iterator[Stack]:
    """Run a stack for one command, until the block ends. ``wanted``: further arguments of `start`.

    Enter it on the main thread. Raises: as `start`; ServiceError in the block within a second of a service's death.
    """
    key = secrets.token_urlsafe(24)
    with Services(folder / "logs", env={**QUIET, "AGENTCORE_RL_GATEWAY_ADMIN_KEY": key}) as services:
        stack = start(services, agent, folder=folder, admin_key=key, **wanted)
        with services.watched():
            yield stack


@contextlib.contextmanager
def running_or_own(
    agent: Path | None,
    *,
    folder: Path,
    sessions: Mapping[str, Any],
    hidden: Sequence[Path | str | None],
    alone: bool = False,
    **wanted: Any,
) -> Iterator[Stack]:
    """Yield the stack of `agentcore-rl up` in this folder if it has this agent (None: any) and the wanted model, or run one.

    ``sessions`` are the options of sessions: with one of them, or ``alone``, it is always a new stack. Sessions cannot read
    ``hidden``.
    ``wanted`` are further arguments of `start`, and ``folder`` is its folder. Raises: as `own`.
    """
    running = None if alone else Stack.running()
    if running is not None and not any(sessions.values()) and running.has(agent, wanted):
        from ...runtime.remote import RuntimeView

        use_local_credentials()
        running = running.renewed()
        RuntimeView(running.runtime_url).hide(hidden)
        yield running
        return
    if running is not None:
        click.echo(
            "`agentcore-rl up` runs here with another agent, model, engine or options of sessions: this command starts its "
            "own services",
            err=True,
        )
        agent = agent or Path(running.agent)
    assert agent is not None  # otherwise `check_agent` raises
    with own(agent, folder=folder, **session_arguments(sessions, hidden), **wanted) as stack:
        yield stack


def _slow_start(runtime: Any) -> str | None:
    """Return a note for agents that cannot be forked, so that each session loads the agent again; otherwise None."""
    for loaded in runtime.get("/_local/status")["templates"]:
        if loaded.get("reason") and loaded.get("start") in ("exec", "libraries"):
            how = "loads the agent again, which is slow" if loaded["start"] == "exec" else "runs the agent's file again"
            return f"each {how}: {loaded['reason']}"
    return None


def check_agent(agent: str | None, *, own_sessions: bool) -> None:
    """Raise ConfigError without a given or served agent, or if the served agent lacks the requested sessions."""
    if agent is not None:
        if not agent.startswith("arn:"):
            agent_file(agent)
        return
    if Stack.running() is None:
        raise ConfigError("--agent is missing, and no `agentcore-rl up` runs in this folder")
    if own_sessions:
        raise ConfigError(
            "--agent FILE is missing: with --session-env, --readable or --writable this command starts its own services; "
            "to use those of `agentcore-rl up`, give the options to `up`"
        )


def agent_file(path: str) -> Path:
    """Return the agent's file, as `find_agent` finds it. Raises: ConfigError with what to do."""
    found = find_agent(path)
    if not found.is_file():
        raise ConfigError(f"there is no agent file {path}; `agentcore-rl init NAME` makes one")
    return found


def find_agent(path: str) -> Path:
    """Find an agent's file by its path, its module, or its name in a project of AWS's command `agentcore`.

    A module (`shop.agent`, or `shop.agent:app`) is looked for in this folder and its `src`.
    Raises: ConfigError if another app of the module is served.
    """
    module, _, app = path.partition(":")
    if Path(path).is_file() or not all(name.isidentifier() for name in module.split(".")):
        return Path(path).resolve()
    inside = module.replace(".", "/")
    places = (Path(top) / f"{inside}{end}" for top in (".", "src") for end in (".py", "/__main__.py"))
    found = next((place for place in places if place.is_file()), Path(path))
    if app not in ("", "app") and found.is_file() and re.search(r"^app\b.*=", found.read_text(), re.MULTILINE):
        raise ConfigError(f"--agent {path}: {found} serves its `app`; move {app} into a separate file")
    if not found.is_file() and path.isidentifier() and (runtime := find_runtime(path, Path.cwd())) is not None:
        return runtime
    return found.resolve()


def explain(error: AgentCoreRLError, gone: str | None = None) -> str:
    """Return the cause, and then the whole error: a runtime's may be a traceback.

    ``gone`` is a folder that no longer exists: its files are left out.
    """
    text = str(error).strip()
    if gone is not None:
        text = re.sub(rf"(; output:)? (\({re.escape(gone)}[^\n)]*\)|{re.escape(gone)}[^\s)]*)", "", text)
    cause = cause_of(text) if isinstance(error, LocalRuntimeError) else text
    return text if text.startswith(cause) else f"{cause}\n{text}"


@contextlib.contextmanager
def scratch_folder(command: str) -> Iterator[Path]:
    """Make a folder for the services of one command. An error in the block ends the process, except a ConfigError."""
    scratch = tempfile.TemporaryDirectory(prefix=f"agentcore-rl-{command}-", ignore_cleanup_errors=True)
    try:
        with scratch:
            yield Path(scratch.name)
    except ConfigError:
        raise
    except AgentCoreRLError as e:
        click.echo(visible(f"error: {explain(e, gone=scratch.name)}"), err=True)
        sys.exit(1)
