"""Ablations, released code and additional variants of BAPO (docs/paper.md)."""
