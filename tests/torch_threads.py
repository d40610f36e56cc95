"""Another number of torch's threads, for as long as it takes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(num: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)
