"""One training loop over small training clients: torch in this process, and services with training verbs (Tinker, SageMaker)."""
