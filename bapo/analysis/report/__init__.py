"""What figures and tables of runs are made of.

data.py      records -> curves; ledger.py: what a run spent
drawing.py   the only place with matplotlib: figures as PNG and PDF
"""
