"""What `benchmarks/soak.py` runs: the agent, the scripted model, the trainer, the disturbances and what is checked afterwards."""
