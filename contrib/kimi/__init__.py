"""Kimi k1.5 (arXiv 2501.12599): loss and selector."""
