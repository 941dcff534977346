"""GEPA: its search over an agent's texts, with our rollouts as its evaluations (arXiv:2507.19457)."""
