"""Where fetched models are kept between runs."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the root of the cache; it need not exist yet.

    The first one set of `$BLOCKDRAFT_CACHE`, `$XDG_CACHE_HOME/blockdraft`, `~/.cache/blockdraft`.
    Everything below it can be deleted at any time and is fetched again when needed.
    """
    if own := os.environ.get("BLOCKDRAFT_CACHE"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).absolute() / "blockdraft"
    return Path.home() / ".cache" / "blockdraft"
