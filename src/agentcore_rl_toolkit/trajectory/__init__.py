"""Turns of a session -> training sequences. Pure lists and numbers: no torch, no I/O."""

from .build import build_trajectory
from .selection import SIDE_CALLS
from .sequence import ExpertSpan, FidelityReport, TrainingSequence, Trajectory
from .turn import BRANCH_REASONS, CUTS, UNFINISHED_REASONS, Turn

__all__ = [
    "BRANCH_REASONS",
    "CUTS",
    "SIDE_CALLS",
    "UNFINISHED_REASONS",
    "ExpertSpan",
    "FidelityReport",
    "TrainingSequence",
    "Trajectory",
    "Turn",
    "build_trajectory",
]
