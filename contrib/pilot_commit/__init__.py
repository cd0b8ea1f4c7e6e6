"""Pilot-Commit (arXiv 2605.26606): a few responses first."""
