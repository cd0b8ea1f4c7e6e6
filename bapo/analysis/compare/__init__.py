"""Runs beside each other: the paper's tables and what its figures show, from the records of any set of runs.

gather.py      run directories or a study -> methods with their runs; unlike measurements are refused
contrasts.py   which methods are compared with which
accuracy.py    accuracies over seeds and prompts, paired tests
responses.py   two methods at equal responses, and responses for equal accuracy
migration.py   prompts that move between accuracy bins; what trained those that were rescued
unsolved.py    held-out prompts that the base model fails: one population for all methods
tables.py      tables 1 and 2 as rows; pair_tables.py and rescue_tables.py the others
published.py   the paper's own numbers
"""
