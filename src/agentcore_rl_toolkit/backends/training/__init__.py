"""The training loop and its clients: torch in this process, Tinker, and SageMaker."""
