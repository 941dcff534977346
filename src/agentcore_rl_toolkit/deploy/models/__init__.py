"""A trained model on AWS: its folder is checked, uploaded, served by SageMaker or imported into Bedrock, and given to agents."""

from .agents import AgentSwitch, ConfigurationBundle
from .bedrock import ImportedModel
from .facts import ModelFacts, read_model
from .sagemaker import SageMakerEndpoint

__all__ = ["AgentSwitch", "ConfigurationBundle", "ImportedModel", "ModelFacts", "SageMakerEndpoint", "read_model"]
