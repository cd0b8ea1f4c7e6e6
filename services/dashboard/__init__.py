"""The web page of a run, as a service: it reads a run directory, and asks the buffer for what only that knows.

__main__.py      the process of a live run; view.py: the page of records alone, served or exported
app.py           routes, errors, who may see what
endpoints.py     the data API, one line per answer; overview.py, prompts.py, group.py and search.py give them
run_view.py      the run as endpoints see it: records up to now and folds over them
assets.py        the files of the page as they are served, and the whole page as one file
static/          index.html, app/ (shell, data, charts), overview/ and pages/ (one file each), vendor/
"""
