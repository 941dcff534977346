"""Records in the store: noticing new ones, reading and judging them, reading old ones again."""
