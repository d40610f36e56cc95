"""Measurements of speed: plain decoding against drafting, and against other engines.

What the measurements share stands here. `config.py` holds their options, and `workload.py` and
`sets.py` the prompts. `decode.py` decodes them in one way or another, and gives a `TimedOutput` for
each. `measures.py` defines what is made of those, `journal.py` keeps them until a run is finished,
and `result.py` says what is at the head of every result file.

* `speed/`: `bench speed`, one request at a time. `scores/` counts its right answers, and `outside/`
  runs other engines beside it.
* `load/`: concurrent requests. `bench concurrency`, `never-slower`, `pareto` and `traffic`.
* `context/`: `bench context`, long prompts.
* `ledger/`: where the time of a step goes, for --ledger and --waterfall.
* `plan/`: `bench plan`, replicas by a measured curve.
* `report/`: `bench report`, results as tables, plots and pages.

A measurement returns dataclasses; `report.py`, or the file `*_report.py` beside it, makes JSON and
a table on the terminal of them. `report/` knows nothing but that JSON.
"""
