"""A run on disk: the folder of training or evaluation, written as it happens, read one rollout at a time."""

from .demonstrations import demonstrations
from .diagnosis import diagnose
from .folder import find_run, find_runs, locked, read_config, write_config
from .frames import messages_df, rollouts_df, steps_df
from .reader import Query, RunReader
from .record import Rollout, TokenSequence
from .tables import TokenTexts
from .writer import RunWriter

__all__ = [
    "Query",
    "Rollout",
    "RunReader",
    "RunWriter",
    "TokenSequence",
    "TokenTexts",
    "demonstrations",
    "diagnose",
    "find_run",
    "find_runs",
    "locked",
    "messages_df",
    "read_config",
    "rollouts_df",
    "steps_df",
    "write_config",
]
