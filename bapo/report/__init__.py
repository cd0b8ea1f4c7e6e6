"""`report.html`: one page about a run, made from its records alone and readable offline.

data.py      records -> the numbers of each figure and table; theorem.py: those of the theorem meter
figures.py   numbers -> inline SVG (the only place with matplotlib)
page.py      all of it -> one HTML page, with the pieces of markup.py; theorem_section.py: the theorem meter's section
"""
