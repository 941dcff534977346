"""Sessions on the machines of a Ray cluster: a local runtime on each node, and a front that sends every call to its node."""
