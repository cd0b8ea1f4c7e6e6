"""Balanced clipping: BAlanced Policy Optimization of Xi et al. (arXiv 2510.18927)."""
