"""ReMix (arXiv 2507.06892): a part of the batch from earlier steps."""
