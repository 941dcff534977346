"""A trained model on AWS: its folder is checked, uploaded, served by SageMaker or imported into Bedrock, and given to agents."""
