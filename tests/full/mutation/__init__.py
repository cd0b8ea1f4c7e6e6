"""Proves the tests of the store: small seeded bugs, each of which some test must find."""
