"""Generalized PPO with an additive center (arXiv 2507.06892, after GePPO, arXiv 2111.00072)."""
