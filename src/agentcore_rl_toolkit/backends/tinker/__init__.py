"""Tinker: its SDK as a training client of `backends.training`, and its settings."""
