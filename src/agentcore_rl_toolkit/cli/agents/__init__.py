"""The agents that commands are given: those of AWS's own command line."""
