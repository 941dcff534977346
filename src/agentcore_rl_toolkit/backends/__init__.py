"""Trainers on one shared core: `collect` runs groups of rollouts, `samples` turns them into training data.

Each trainer has a folder of its own (`trl`, `slime`, `verl`, `rllm`, `tinker`), imported only when asked for.
"""
