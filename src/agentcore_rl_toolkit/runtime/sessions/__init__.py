"""Sessions: the table of them, how they start and end, requests to them, and the stores they may write to."""
