"""A tiny pair, loaded once a module, and a server around it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from blockdraft import LLM
from tests.serving import Running, running_server
from tests.small_llm import load_llm


@pytest.fixture(scope="module")
def llm(folders: tuple[Path, Path]) -> LLM:
    """The pair, for up to four requests at once."""
    return load_llm(folders, max_concurrency=4)


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    """Without options."""
    with running_server(llm) as running:
        yield running
