"""Tasks, environments and the benchmark's own reward. The only module that imports tau2.

τ²-bench ("tau2") has three domains. An *episode* is one task being worked on: an environment in the task's initial state, and
the conversation so far in the benchmark's own messages, which is what its reward is computed from.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from loguru import logger

logger.disable("tau2")  # it logs every call at debug level, and a warning where there is no .env file
# tau2 imports pandas, whose linear algebra starts threads at import; a process with threads cannot be forked for each session.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from tau2.data_model.message import AssistantMessage, ToolCall, UserMessage  # noqa: E402  (after the line above)
from tau2.data_model.tasks import RewardType, Task  # noqa: E402
from tau2.evaluator.evaluator_action import ActionEvaluator  # noqa: E402
from tau2.evaluator.evaluator_communicate import CommunicateEvaluator  # noqa: E402
from tau2.evaluator.evaluator_env import EnvironmentEvaluator  # noqa: E402

Domain = Literal["telecom", "retail", "airline"]
Split = Literal["train", "test", "base"]
SOLO = {
    "telecom": True,
    "retail": False,
    "airline": False,
}  # solo: a ticket in place of a user, all tools with the agent


@functools.cache
def splits(domain: Domain) -> dict[str, list[str]]:
    """Ids of the published splits: ``train``, ``test``, and ``base``, which is both."""
    return dict(_module(domain).get_tasks_split())


@functools.cache
def _tasks(domain: Domain) -> dict[str, Task]:
    return {task.id: task for task in _module(domain).get_tasks("base")}


def find_task(domain: Domain, task_id: str) -> Task:
    """The task of that id in the published splits. Raises: KeyError with what to do."""
    try:
        return _tasks(domain)[task_id]
    except KeyError:
        raise KeyError(f"{domain} has no task {task_id!r}; `python data.py` writes the ids of every split") from None


def tasks(domain: Domain, split: Split) -> list[Task]:
    """The tasks of a split, in its order."""
    return [_tasks(domain)[task_id] for task_id in splits(domain)[split]]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The scores of an episode. Each is 0.0 or 1.0, except the share.

    ``published``: the reward of the benchmark, as in its leaderboard. ``actions``: all published actions were taken.
    Additional actions do not change it. ``share``: the share of the published actions that were taken. ``state``: only the
    assertions about the environment or its database.
    """

    published: float
    actions: float
    share: float
    state: float

    @property
    def both(self) -> float:
        return self.published * self.actions


@dataclass
class Episode:
    """A task during the work on it. It is not thread-safe, because all calls change one environment.

    ``repaired`` are indexes of the published solution. These actions were taken before the work begins.
    """

    domain: Domain
    task: Task
    repaired: Sequence[int] = ()
    environment: Any = field(init=False)
    messages: list[Any] = field(init=False, default_factory=list)
    calls: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.environment = new_environment(self.domain)
        state = self.task.initial_state
        self.environment.set_state(
            initialization_data=state and state.initialization_data,
            initialization_actions=state and state.initialization_actions,
            message_history=(state and state.message_history) or [],
        )
        published = gold_actions(self.task)
        for k in self.repaired:
            self._take(f"repaired_{k}", *published[k])

    @property
    def solo(self) -> bool:
        return SOLO[self.domain]

    @property
    def policy(self) -> str:
        """Return the instructions of the benchmark for agents of this domain, as Markdown."""
        return str(self.environment.get_policy())

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Take an action, and return the reply of the environment. For an impossible action, the reply begins with Error."""
        self.calls += 1
        return self._take(f"call_{self.calls}", name, arguments)

    def _take(self, call_id: str, name: str, arguments: Mapping[str, Any]) -> str:
        call = ToolCall(id=call_id, name=name, arguments=dict(arguments), requestor="assistant")
        reply = self.environment.get_response(call)
        self.messages += [AssistantMessage(role="assistant", content=None, tool_calls=[call]), reply]
        return str(reply.content)

    def say(self, text: str) -> None:
        """The agent's words to the user."""
        self.messages.append(AssistantMessage(role="assistant", content=text or " "))

    def hear(self, text: str) -> None:
        """The user's words to the agent."""
        self.messages.append(UserMessage(role="user", content=text))

    def scores(self) -> Scores:
        """Run the evaluators of the benchmark, which replay the conversation in new environments."""
        basis = set(self.task.evaluation_criteria.reward_basis)
        unknown = basis - {RewardType.DB, RewardType.ENV_ASSERTION, RewardType.ACTION, RewardType.COMMUNICATE}
        if unknown:
            raise ValueError(f"task {self.task.id} is rewarded for {unknown}, which takes a judge model")
        taken = ActionEvaluator.calculate_reward(self.task, self.messages)
        actions, checks = float(taken.reward), taken.action_checks or []
        state = EnvironmentEvaluator.calculate_reward(
            environment_constructor=functools.partial(_constructor, self.domain),
            task=self.task,
            full_trajectory=self.messages,
            solo_mode=self.solo,
        ).reward
        published = state if basis & {RewardType.DB, RewardType.ENV_ASSERTION} else 1.0
        if RewardType.ACTION in basis:
            published *= actions
        if RewardType.COMMUNICATE in basis:
            published *= CommunicateEvaluator.calculate_reward(self.task, self.messages).reward
        share = sum(check.action_match for check in checks) / len(checks) if checks else actions
        return Scores(published=float(published), actions=actions, share=share, state=float(state))


def left_to_do(episode: Episode) -> list[tuple[str, dict[str, Any]]]:
    """Return the published solution without the repairs from before."""
    return [action for k, action in enumerate(gold_actions(episode.task)) if k not in episode.repaired]


def gold_actions(task: Task) -> list[tuple[str, dict[str, Any]]]:
    """(tool, arguments) of the published solution, in order."""
    return [
        (action.name, json.loads(json.dumps(action.arguments))) for action in task.evaluation_criteria.actions or []
    ]


def new_environment(domain: Domain) -> Any:
    """An environment in the domain's initial state: a copy of the first one, since making one takes a tenth of a second."""
    return copy.deepcopy(_pristine(domain))


def _constructor(domain: Domain, solo_mode: bool = False) -> Any:
    return new_environment(domain)


@functools.cache
def _pristine(domain: Domain) -> Any:
    return _module(domain).get_environment(solo_mode=SOLO[domain])


@functools.cache
def tool_schemas(domain: Domain) -> dict[str, dict[str, Any]]:
    """The agent's tools as OpenAI function schemas, by name. In solo mode these are the user's as well."""
    environment = _pristine(domain)
    found = environment.get_tools()
    if SOLO[domain]:
        found = [*found, *environment.get_user_tools()]
    return {tool.name: tool.openai_schema["function"] for tool in found}


def _module(domain: Domain) -> Any:
    return importlib.import_module(f"tau2.domains.{domain}.environment")


def preload(domain: Domain) -> None:
    """Read tasks and databases now, so that sessions forked from this process have them."""
    _tasks(domain)
    _pristine(domain)
    tool_schemas(domain)
