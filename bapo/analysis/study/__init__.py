"""`bapo study`: several methods, several seeds, each a run of its own, on one machine.

plan.py       STUDY.toml -> the runs, each with its whole configuration
fairness.py   what must not differ between methods
state.py      what there is of each run already: finished, to be continued, to be made
schedule.py   which run comes next, and how long the rest takes; pure
results.py    results.jsonl: one line per run that has ended
archive.py    the records of finished runs as one file, to publish them or to go on elsewhere
runner.py     starts the runs, looks after them, ends them
"""
