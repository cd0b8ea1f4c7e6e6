"""Questions to a recorded run, answered from its group records only.

recording.py     RUN/groups and RUN/metrics.jsonl -> what each assembly saw and the batch that followed
simulation.py    the composer over recorded groups, with the run's settings or with others
explanation.py   why a prompt was or was not in a batch, in one sentence
history.py       every visit of a prompt, and when it entered and left each table
replayable.py    which steps the learner can repeat

Batches only: a simulation does not tell what the model would have learned from another batch.
"""
