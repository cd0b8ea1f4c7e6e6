"""Prompts by learnability (arXiv 2502.12272)."""
