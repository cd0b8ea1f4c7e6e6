"""Generalized advantage estimation against a critic (PPO, arXiv 1707.06347; arXiv 1506.02438)."""
