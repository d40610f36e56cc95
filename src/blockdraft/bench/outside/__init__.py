"""Other engines beside ours, on the same prompts, in turns.

None of them is ever imported here. `engines.py` lists them by name: what pip installs for each, and
which script of `workers/` runs it. `environments.py` installs that into an environment of its own
below the cache. `process.py` starts the script there and talks to it; `endpoint.py` asks a server
by URL instead; `interface.py` says what both offer. `others.py` starts what a run asks for, and
keeps what fails as a reason, so that nothing is lost. `figures.py` says what came out.
"""
