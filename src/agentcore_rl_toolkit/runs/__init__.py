"""A run on disk: the folder of training or evaluation, written as it happens, read one rollout at a time."""

from .demonstrations import demonstrations, write_rows
from .diagnosis import Finding, diagnose
from .folder import (
    FAILED,
    METRICS,
    ROLLOUTS,
    append_event,
    find_run,
    find_runs,
    is_run,
    locked,
    make_folder,
    read_config,
    read_metrics,
    stamp,
    status,
    write_config,
)
from .frames import messages_df, rollout_rows, rollouts_df, steps_df
from .in_flight import in_flight, read_in_flight
from .reader import Query, RunReader
from .record import Rollout, TokenSequence
from .spans import SpanSender
from .tables import TokenTexts
from .writer import RunWriter

__all__ = [
    "FAILED",
    "METRICS",
    "ROLLOUTS",
    "Finding",
    "Query",
    "Rollout",
    "RunReader",
    "RunWriter",
    "SpanSender",
    "TokenSequence",
    "TokenTexts",
    "append_event",
    "demonstrations",
    "diagnose",
    "find_run",
    "find_runs",
    "in_flight",
    "is_run",
    "locked",
    "make_folder",
    "messages_df",
    "read_config",
    "read_in_flight",
    "read_metrics",
    "rollout_rows",
    "rollouts_df",
    "stamp",
    "status",
    "steps_df",
    "write_config",
    "write_rows",
]
