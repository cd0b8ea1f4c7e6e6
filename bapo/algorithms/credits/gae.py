"""Generalized advantage estimation against a critic (PPO): `learner/update/critic.py` computes it."""

from __future__ import annotations

from bapo.algorithms.credits.group import OfGroup


class Gae(OfGroup):
    """The advantage `gae`; until the critic has run, tokens have that of their group."""

    needs_critic = True
