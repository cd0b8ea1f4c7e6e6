"""The web page of a run: its files, the numbers behind it, and how both become one offline file.

    static/        index.html, app/ (shell, data, charts), pages/ (one file each), vendor/
    endpoints/     one file per answer of the data API: `answer(view, ...) -> JSON values`
    following.py   what a run directory has written since the last look
    view.py        the run as endpoints see it: records up to now, folds over them, the live buffer
    assets.py      the files of the page as they are served; export.py: the whole page as one file

Who serves it: `buffer_service/routes/web.py`, for a run that goes on and, by `bapo view`, for any run directory.
How to add a page, an endpoint or a chart: docs/web.md. Knows no HTTP.
"""
