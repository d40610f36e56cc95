"""Attention of targets and drafters.

`visibility` says who sees whom, once. `plan` is what a forward over pages attends to. `paged` lets
transformers models follow such a plan, `exact` gives them attention of one sequence with a cache.
What computes is a backend (`kernels.interface`).
"""
