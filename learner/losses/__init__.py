"""Policy losses: one file per method, which defines `make_loss`.

base         inputs and outputs of a loss, and its lookup by name
ratios       probability ratios and how they are clipped
aggregation  a weight per token over the mini-batch
objective    a loss with its importance weight, its KL term and its entropy
"""
