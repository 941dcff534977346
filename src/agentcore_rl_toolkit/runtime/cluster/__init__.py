"""The runtime over many machines: a node agent on each, the same router in front."""
