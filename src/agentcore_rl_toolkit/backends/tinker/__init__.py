"""Tinker: its SDK as a training client of `backends.primitives`, and its settings."""
