"""Training over a service with primitives (forward_backward, optim_step, save weights, sample): loop, publishing, data, run."""
