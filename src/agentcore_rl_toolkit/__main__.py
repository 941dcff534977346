"""`python -m agentcore_rl_toolkit`: the command line where no script is on the PATH."""

from .cli.main import main

main()
