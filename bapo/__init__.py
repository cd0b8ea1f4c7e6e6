"""The heart of BAPO: values and rules, without network, clock or global randomness.

BAPO = Batch Adaptation Policy Optimization (Wan et al., ICLR 2026, arXiv 2602.20722).
Imports without torch, vllm, ray or redis; a test proves it.
"""

__version__ = "0.1.0"
