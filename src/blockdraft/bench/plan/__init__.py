"""From a measured curve, traffic and a price to the number of replicas, for `bench plan`.

`traffic.py` holds the requests, `queueing.py` the formula, `simulation.py` what checks it, and
`replicas.py` the plan that is made with both.
"""
