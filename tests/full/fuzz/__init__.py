"""Fuzzers: short in the test suite, long by hand (docs/threat_model.md has the commands and the figures)."""
