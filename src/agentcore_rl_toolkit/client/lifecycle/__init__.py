"""A rollout from its place in the queue to the stopped session: one rollout, and the engine that all of a client share."""
