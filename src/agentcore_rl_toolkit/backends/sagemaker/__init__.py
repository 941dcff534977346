"""SageMaker Training Sessions: boto3 as a training client of `backends.training`, the session's life, and settings."""
