"""LUFFY (arXiv 2504.14945): batches with expert rows, and policy shaping."""
