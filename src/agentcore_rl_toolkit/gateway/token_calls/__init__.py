"""Calls in which the gateway does the tokenising."""
