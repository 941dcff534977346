"""Amazon SageMaker on this machine: training sessions and multi-turn RL jobs over the built-in policy, for unmodified clients."""
