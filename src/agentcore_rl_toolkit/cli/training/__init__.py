"""Training on this machine: the quickstart, `train` with an agent of one's own, and the stack of services they run on."""
