"""Off-policy GRPO (arXiv 2505.22257), the paper's baseline."""
