"""verl: remote agents for its V1 trainer. Only `dataset` and `manager` need verl or torch."""

from .convert import to_verl
from .settings import AgentCoreConfig, VerlConfig

__all__ = ["AgentCoreConfig", "VerlConfig", "to_verl"]
