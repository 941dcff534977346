"""A rollout from its place in the queue to the stopped session: the engine and what it does at each stage."""
