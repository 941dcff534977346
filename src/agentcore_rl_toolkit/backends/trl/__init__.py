"""TRL: `GRPOTrainer` on agents that run elsewhere. `adapter` loads TRL and torch; `config` and `convert` do not."""

from .config import TrlConfig
from .convert import ConvertStats, to_trl

__all__ = ["ConvertStats", "TrlConfig", "to_trl"]
