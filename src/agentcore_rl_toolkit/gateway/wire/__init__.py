"""The agent's side of a call: requests in, replies out."""
