"""Questions to a recorded run, answered from its group records alone.

recording.py      RUN/groups and RUN/metrics.jsonl -> what each assembly saw and what became of it
simulation.py     the real composer over recorded groups, with the run's settings or with others
reevaluation.py   outcomes of re-evaluations that the run did not make
explanation.py    why a prompt was or was not in a batch, in one sentence
page.py           a simulation as one offline page

Batches only: none of this says what the model would have learned from another batch.
"""
