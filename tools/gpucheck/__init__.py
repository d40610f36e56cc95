"""The parts of tools/gpu_check.py.

`runner.py` runs each part of `parts.py` as a process of its own (`child.py`), under a time limit.
A part gets `Settings` and `Notes`: what it notes is on the disk at once, so a part that fails,
hangs or is killed loses nothing but the rest of itself. `report.py` makes one JSON file and one
page of all notes; `private.py` takes out what says whose machine it was. Parts measure by what
blockdraft has for it (bench, proof, train, measure); nothing here is used by the package.
"""
