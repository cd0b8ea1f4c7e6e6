"""POPO (arXiv 2606.01281): the youngest informative groups again."""
