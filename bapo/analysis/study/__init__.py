"""`bapo study`: several methods, several seeds, each a run of its own, on one machine.

plan.py      STUDY.toml -> the runs, each with its whole configuration; what must not differ between methods
state.py     what there is of each run: state, line of results.jsonl
runner.py    which run is next, the launcher processes, the lines for the user
archive.py   the records of finished runs as one file
"""
