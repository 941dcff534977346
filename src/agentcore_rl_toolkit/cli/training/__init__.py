"""Training on this machine: the quickstart, `train` with the user's agent, and the services of both."""
