"""The web page of a run, as a service: reads the run directory, and live data from the buffer.

__main__.py      the process of a live run; view.py: the page from records only, served or exported
app.py           routes, errors, permissions
endpoints.py     the data API, one line per endpoint, implemented in overview.py, prompts.py, group.py and search.py
run_view.py      the run as endpoints see it: records so far and folds over them
assets.py        the static files as served, and the whole page as one file
static/          index.html, app/ (shell, data, charts), overview/ and pages/ (one file each), vendor/
"""
