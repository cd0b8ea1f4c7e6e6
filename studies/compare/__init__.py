"""Compare runs: the paper's tables and figures from the records of any set of runs.

gather.py        run directories or a study -> methods with their runs; references; remarks
accuracy.py      accuracies over seeds and prompts, differences, equal responses
prompts.py       prompts that move between accuracy bins, newly solved prompts
composition.py   what batches were made of
tables.py        the tables as rows of text; published.toml: the paper's own numbers
figures.py       the figures
page.py          everything in a folder
"""
