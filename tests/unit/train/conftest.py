"""What several modules with training runs ask for."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from blockdraft.train.config import TrainConfig
from tests.torch_threads import threads
from tests.train_runs import small_config


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums of several threads may differ from run to run."""
    with threads(1):
        yield


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return small_config(tmp_path)
