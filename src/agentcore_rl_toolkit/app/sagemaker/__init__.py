"""Rollouts of Amazon SageMaker's multi-turn RL jobs: the same agent, its model calls signed, its rewards reported to the job."""
