"""Makers of rollout functions: one file a prefix of `agents.rollout` (../rollouts.py)."""
