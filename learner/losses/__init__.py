"""Policy losses: one file per method, found by `registry`; the parts that they share have no `make_loss`.

    ratios  clips  corrections  divergences  aggregation      formulas, written once
    base                                                      what a loss is given and what it gives

`learner/loss.py` joins a loss with its importance weight, its KL term and its entropy.
"""
