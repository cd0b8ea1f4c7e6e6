"""Several runs: methods x seeds on one machine (`bapo study`), and what differs (`bapo compare`, `bapo report`).

plan.py           STUDY.toml -> the runs, each with its whole configuration; what must not differ between methods
state.py          what there is of each run: state, line of results.jsonl
runner.py         which run is next, the launcher processes, the lines for the user
ledger.py         what a run cost
significance.py   intervals over seeds and prompts
compare/          the paper's tables and figures from the records of any runs
commands/         the commands

Reads run directories and starts launchers. Nothing imports it: `bapo` loads its commands when one is called.
"""
