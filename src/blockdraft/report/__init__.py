"""Every HTML page that a command writes: templates and one stylesheet, in one file each.

A page needs nothing else, neither a network nor another file. `render.py` fills a template; what a
page says is made ready by the package that it tells of (`proof/page.py`,
`diagnose/explain/page.py`, `bench/ledger/page.py`, `bench/report/documents.py`, `train/report.py`).
All values are escaped, but for those that are `Markup`.
"""
