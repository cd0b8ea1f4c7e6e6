"""The learner: Algorithm 1 without the sampling."""

from bapo.runtime.torchvision_build import complete_torchvision

complete_torchvision()  # before transformers is imported anywhere below
