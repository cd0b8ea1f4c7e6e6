"""AReaL's decoupled loss and masks (arXiv 2505.24298)."""
