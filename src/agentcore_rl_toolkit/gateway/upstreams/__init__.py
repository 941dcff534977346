"""Chooses the inference server and the connection of a call."""
