"""rLLM: configuration, data and scripts for its AgentCore runtime, and conversion to its episode shape."""
