"""The policy over HTTP: one endpoint of token ids, weights, and the process that serves them."""
