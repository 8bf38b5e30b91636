"""The console: web pages at `/console`, rendered by the gateway, over the services of its other routes.

Begin with `routes.py`. `access.py` decides who sees what, `pages/` has a module for each group of pages, `render.py`
fills the templates, `live.py` streams figures to browsers, and `history.py` has an hour of them. `Console` loads Jinja2
and the pages when a browser first asks for one. `static/` has scripts of others beside our own (`SOURCE.json`).
"""
