"""Trainers on one shared core: `collect` runs groups of rollouts, `advantages` and `batch` turn them into training
rows.

Each trainer has a folder of its own (`trl`, `slime`, `verl`, `rllm`, `tinker`), imported only when asked for.
"""
