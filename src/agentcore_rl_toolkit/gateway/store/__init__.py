"""Sessions and their model calls on disk, in one SQLite file."""
