"""Amazon SageMaker Training Sessions on this machine, for unmodified clients: boto3, and the SDK `sagemaker-train`."""
