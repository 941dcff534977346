"""`python -m agentcore_rl_toolkit.cli`: the command line for a PATH without the script."""

from .main import main

main()
