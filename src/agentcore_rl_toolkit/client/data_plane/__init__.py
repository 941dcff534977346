"""AgentCore's data plane as a caller sees it: requests, their pace, retries, stopping sessions."""
