"""Starts session processes: a template process per agent, forked once per session."""
