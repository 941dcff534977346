"""The output of commands: dialogues, tables, progress, waiting."""
