"""Questions to a recorded run, answered from its group records only.

simulation.py    the composer over recorded groups, with the run's settings or with others
explanation.py   why a prompt was or was not in a batch

Batches only: a simulation does not tell what the model would have learned from another batch.
"""
