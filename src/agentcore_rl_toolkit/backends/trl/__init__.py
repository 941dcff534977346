"""TRL: `GRPOTrainer` on agents that run elsewhere. `adapter` loads TRL and torch; `config` and `convert` do not."""

from .convert import ConvertStats, to_trl
from .settings import TrlConfig

__all__ = ["ConvertStats", "TrlConfig", "to_trl"]
