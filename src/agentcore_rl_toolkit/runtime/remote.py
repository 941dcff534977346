"""A client of a running local runtime, for the command line. Standard library HTTP only."""

from __future__ import annotations

import codecs
import contextlib
import http.client
import json
import os
import time
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .._servers import keys, sigv4
from ..errors import ConfigError, LocalRuntimeError
from . import roots
from .agents.version_fields import LOCAL_ARTIFACT
from .launcher.session_log import KEPT_PART

TIMEOUT_S = 30.0
DEPLOY_TIMEOUT_S = 900.0
_ROLE = "arn:aws:iam::123456789012:role/local"
_HOW_TO_SIGN = (
    "if you started the runtime, its key is found by its address; for another runtime, set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY"
)


class RuntimeView:
    """Talks to one runtime. Every method raises LocalRuntimeError when it cannot be reached or refuses.

    ``credential``: access key and secret that requests are signed with. None: what the runtime left for this user, otherwise
    the environment's. ``timeout_s`` bounds each read.
    """

    def __init__(self, url: str, credential: tuple[str, str] | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._credential = credential or keys.credential_of_runtime(url)
        key, secret = (os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
        if self._credential is None and key and secret:
            self._credential = key, secret

    @classmethod
    def find(cls, url: str | None = None) -> RuntimeView:
        """Find the runtime at ``url``, otherwise this user's newest running one. Raises: ConfigError when there is none."""
        if url is not None:
            if urllib.parse.urlsplit(url).scheme not in ("http", "https") or not urllib.parse.urlsplit(url).hostname:
                raise ConfigError(f"--url must be like http://127.0.0.1:PORT, got {url!r}")
            return cls(url)
        running = roots.live_servers()
        if not running:
            raise ConfigError(
                "no runtime of yours is running; start one with `agentcore-rl runtime serve`, or give --url"
            )
        return cls(running[0]["url"])

    def call(self, method: str, path: str, body: Any = None) -> bytes:
        """Send a request, and return the body of the reply."""
        data = json.dumps(body).encode() if body is not None else None
        url, timeout_s = self.url + path, self._timeout_s
        try:
            with sigv4.send(self._credential, method=method, url=url, body=data, timeout_s=timeout_s) as reply:
                return bytes(reply.read())
        except urllib.error.HTTPError as e:
            text = e.read().decode(errors="replace") or e.reason
            with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
                text = json.loads(text)["message"]
            hint = f" ({_HOW_TO_SIGN})" if e.code == 403 else ""
            raise LocalRuntimeError(f"{method} {path}: {text}{hint}") from e
        except (OSError, http.client.HTTPException) as e:
            raise LocalRuntimeError(f"cannot reach the runtime at {self.url}: {e}") from e

    def get(self, path: str) -> Any:
        return self.ask("GET", path)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request, and decode the JSON of the reply."""
        return json.loads(self.call(method, path, body))

    def sessions(self, *, ended: bool = False) -> list[dict[str, Any]]:
        """Return live sessions, and the last that ended when asked for."""
        answer = self.get("/_local/sessions")
        found: list[dict[str, Any]] = [*(answer["ended"] if ended else ()), *answer["sessions"]]
        return found

    def log(self, session: str, *, follow: bool = False) -> Iterator[str]:
        """Yield a session's output in pieces."""
        offset, path = 0, f"/_local/sessions/{urllib.parse.quote(session, safe='')}/log"
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        while True:
            data = self.call("GET", f"{path}?offset={offset}")
            offset += len(data)
            if data:
                yield decode(data)
            elif not follow:
                return
            elif offset > KEPT_PART and not self.call("GET", f"{path}?offset={offset - 1}"):
                offset = KEPT_PART  # the runtime has shortened it
            else:
                time.sleep(0.5)

    def stop(self, session: str) -> str:
        """Stop the session with this id, or the only session whose id begins like this. Return its id."""
        return str(self.ask("DELETE", f"/_local/sessions/{urllib.parse.quote(session, safe='')}")["stopped"])

    def deploy(
        self,
        agent: Path | str,
        name: str,
        env: Mapping[str, str],
        *,
        on_wait: Callable[[], None] = lambda: None,
    ) -> str:
        """Create the agent, or a new version of it, and wait until it is loaded. Returns its ARN.

        ``agent`` is the path of its file, or the name of a container image. ``on_wait`` is called ten times a second meanwhile.
        Raises: LocalRuntimeError with the reason when it does not load.
        """
        uri = f"{LOCAL_ARTIFACT}{agent}" if isinstance(agent, Path) else agent
        body = {
            "agentRuntimeName": name,
            "agentRuntimeArtifact": {"containerConfiguration": {"containerUri": uri}},
            "roleArn": _ROLE,
            "environmentVariables": dict(env),
        }
        listed = self.ask("POST", "/runtimes/", {})["agentRuntimes"]
        existing = next((r["agentRuntimeId"] for r in listed if r["agentRuntimeName"] == name), None)
        made = self.ask("PUT", f"/runtimes/{existing}/" if existing else "/runtimes/", body)
        return self._loaded(name, made, on_wait)

    def reload(self, name: str, *, on_wait: Callable[[], None] = lambda: None) -> str:
        """Load an agent's file again, in the environment that it has. Running sessions keep the old code. Returns its ARN.

        Raises: LocalRuntimeError with the reason when it does not load.
        """
        return self._loaded(name, self.ask("POST", f"/_local/agents/{name}/reload", {}), on_wait)

    def hide(self, paths: Iterable[Path | str | None]) -> None:
        """Hide files from the sessions that start from now on. An agent that shows one of them is loaded again.

        Raises: LocalRuntimeError with the reason when it does not load.
        """
        body = [os.path.abspath(path) for path in paths if path is not None]
        for name in self.ask("POST", "/_local/hide", body)["agents"]:
            self.reload(name)

    def _loaded(self, name: str, made: Mapping[str, Any], on_wait: Callable[[], None]) -> str:
        deadline = time.monotonic() + DEPLOY_TIMEOUT_S
        while time.monotonic() < deadline:
            state = self.get(f"/runtimes/{made['agentRuntimeId']}/?version={made['agentRuntimeVersion']}")
            if state["status"] == "READY":
                return str(state["agentRuntimeArn"])
            if state["status"].endswith("FAILED"):
                raise LocalRuntimeError(f"{name} did not load: {state.get('failureReason', state['status'])}")
            on_wait()
            time.sleep(0.1)
        raise LocalRuntimeError(f"{name} was not ready after {DEPLOY_TIMEOUT_S:g} s")
