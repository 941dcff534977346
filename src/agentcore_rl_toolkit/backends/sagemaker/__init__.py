"""SageMaker Training Sessions: boto3 as a training client of `backends.primitives`, the session's life, and settings."""
