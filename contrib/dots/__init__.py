"""DOTS with rollout replay (arXiv 2506.05316), with a predictor that is trained online."""
