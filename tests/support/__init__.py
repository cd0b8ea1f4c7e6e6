"""What tests of several tiers share: builders, fakes, servers as processes, and waiting for conditions."""

from bapo.runtime.torchvision_build import complete_torchvision

complete_torchvision()  # before transformers is imported anywhere below
