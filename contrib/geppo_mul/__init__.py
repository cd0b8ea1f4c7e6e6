"""Generalized PPO with a multiplicative center (DOTS with rollout replay, arXiv 2506.05316)."""
