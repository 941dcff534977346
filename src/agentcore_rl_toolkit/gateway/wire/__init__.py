"""Requests of model calls."""
