"""Engines that are sampled by calls of a client library and answer whole: one transport, and an adapter for each service."""
