"""The life of a rollout, from its place in the queue to the stopped session, and the engine that a client's rollouts share."""
