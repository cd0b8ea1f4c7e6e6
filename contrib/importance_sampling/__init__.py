"""Truncated and masked importance sampling against the inference engine (verl, TRL)."""
