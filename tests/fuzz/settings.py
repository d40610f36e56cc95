"""What a run of the fuzz is told by the environment."""

import os
import secrets

SEED = "BLOCKDRAFT_FUZZ_SEED"
SECONDS = "BLOCKDRAFT_FUZZ_SECONDS"
DEFAULT_SECONDS = 300.0
"""Of each of the four fuzz tests: ten minutes on two cores."""


def fuzz_seed() -> int:
    """The number that all cases of a run are drawn from."""
    return int(os.environ[SEED])


def fuzz_seconds() -> float:
    """How long each fuzz test goes on."""
    return float(os.environ.get(SECONDS, DEFAULT_SECONDS))


def choose_seed() -> None:
    """A seed for this run unless one is set; processes that are started later have the same."""
    os.environ.setdefault(SEED, str(secrets.randbelow(10**9)))


def described() -> str:
    """For the report's header."""
    return (
        f"fuzz: {SEED}={fuzz_seed()}, {SECONDS}={fuzz_seconds():g} each "
        "(set them to run the same cases again)"
    )
