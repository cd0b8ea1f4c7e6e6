"""Policy losses: one class per file. Importing one does not import torch: every process reads their settings.

base       what a loss is given, what it gives, and how the config's name finds it
ratios     probability ratios and how they are clipped
objective  a loss with its importance weight, its KL term, its entropy, and the weight of each token in the mini-batch
"""
