"""Confidence intervals and paired tests of rewards: pure numbers."""
