"""Records in the store: watches for new ones, reads and judges them, and replays old ones."""
