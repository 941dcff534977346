"""Runs in the browser: a small server on this machine, its page, and the page as one file."""
