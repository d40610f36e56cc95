"""The default pair is in order, and its provenance is true of this machine's target."""

import pytest

from blockdraft.core.config import LLMConfig
from blockdraft.diagnose.doctor.examine import examine
from blockdraft.diagnose.doctor.pair import read_pair


@pytest.mark.slow
@pytest.mark.model
def test_the_default_pair_is_in_order() -> None:
    found = examine(read_pair(LLMConfig(), "template"), lambda stage, share: None)
    assert found.in_order, found.checks
    unknown = {check.name for check in found.checks if check.mark == "unknown"}
    assert unknown <= {"memory", "other programs"}  # where the system does not tell
