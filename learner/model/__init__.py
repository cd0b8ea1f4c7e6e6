"""Policies: loading, layers, log-probs."""

from bapo.runtime.torchvision_build import complete_torchvision

complete_torchvision()  # before a module below imports models of transformers
