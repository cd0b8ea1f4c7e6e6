"""What tests of several tiers share: builders, fakes, servers as processes, and waiting for conditions."""
