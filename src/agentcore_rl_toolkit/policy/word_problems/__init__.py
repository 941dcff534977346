"""The task that the built-in policy is trained on: problems, demonstrations, rollouts, and the warm start."""
