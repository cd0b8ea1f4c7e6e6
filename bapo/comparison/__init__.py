"""Runs beside each other: the paper's tables and what its figures show, from the records of any set of runs.

gather.py      run directories or a study -> methods with their runs; unlike measurements are refused
accuracy.py    accuracies over seeds and prompts, paired tests, equal steps and equal rollouts
migration.py   prompts that move between accuracy bins; rescued prompts and what trained them
tables.py      tables 1 and 2, and the tests, as rows
published.py   the paper's own numbers
"""
