"""Metrics and a page about runs, on one HTTP port. Needs the extra `rdzv[web]`.

`history.py` is the model: what an observer saw of one run, folded over time. `metrics.py` and the page are two views of it.
`observer.py` feeds the model with one watch per run. May import everything but the commands.
"""
