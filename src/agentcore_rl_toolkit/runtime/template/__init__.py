"""Code that runs in the agent's interpreter: the template process, the sessions forked from it, and their guards."""
