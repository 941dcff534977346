"""AgentCore's data plane as a caller sees it: requests, their pace, what may be sent again, stopping sessions."""
