"""Credit by the tree of shared prefixes alone: ours, after TEMPO (arXiv 2509.18314)."""
