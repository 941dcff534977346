"""The policy behind HTTP: OpenAI's and vLLM's endpoints, weights, and the process that serves them."""
