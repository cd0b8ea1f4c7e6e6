"""RePO: replay-enhanced policy optimization (arXiv 2506.09340)."""
