"""ARPO's experience replay (arXiv 2505.16282)."""
