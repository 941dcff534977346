"""`python -m agentcore_rl_toolkit`: the command line for a PATH without the script."""

from .cli.main import main

main()
