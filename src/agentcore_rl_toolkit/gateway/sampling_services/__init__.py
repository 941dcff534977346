"""Engines that a client library calls and that do not stream: one transport, and an adapter for each service."""
