"""Sessions on the nodes of a Ray cluster: an actor per node runs the launcher of a single machine."""
