"""A tiny pair, loaded once a module, and a server around it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from blockdraft import LLM
from tests.serving import Running, running_server
from tests.small_llm import load_llm
from tests.tiny import tiny_drafter_folder, tiny_target_folder


@pytest.fixture(scope="module")
def long_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """As always, with a context in which tools can be described byte by byte."""
    root = tmp_path_factory.mktemp("pair")
    return tiny_target_folder(root, max_position_embeddings=4096), tiny_drafter_folder(root)


@pytest.fixture(scope="module")
def llm(folders: tuple[Path, Path]) -> LLM:
    """The pair, for up to four requests at once."""
    return load_llm(folders, max_concurrency=4)


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    """Without options."""
    with running_server(llm) as running:
        yield running
