"""Scripts that run another engine in an environment that holds that engine and no blockdraft.

Each is started with one argument, settings as JSON (see `process.py`), and speaks JSON, a line for
each message: first `{"ready": true, "versions": {...}}`, then for each request an answer or
`{"error": "why"}`. `talk.py` is what they share.
"""
