"""`python -m agentcore_rl_toolkit.cli`: the command line where no script is on the PATH."""

from .main import main

main()
