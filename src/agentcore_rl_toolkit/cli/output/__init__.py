"""What commands print: dialogues, tables, progress, waiting."""
