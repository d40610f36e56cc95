"""What counts as a lack of memory, whoever tells of it."""

import errno

import pytest
import torch

from blockdraft.core.errors import ConfigError
from blockdraft.core.out_of_memory import full_memory_refused

SHORTAGES = (
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."),
    RuntimeError("unable to mmap 100176 bytes from file <x>: Cannot allocate memory (12)"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)
OTHERS = (
    OSError(errno.ENOSPC, "No space left on device"),
    RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 232448"),
    ValueError("a model named out of memory"),
)


@pytest.mark.parametrize("error", SHORTAGES, ids=repr)
def test_a_lack_of_memory_names_the_remedy(error: Exception) -> None:
    with (
        pytest.raises(ConfigError, match=r"^memory ran out \(.+\); lower this$"),
        full_memory_refused("lower this"),
    ):
        raise error


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, full_memory_refused("lower this"):
        raise error
    assert raised.value is error
