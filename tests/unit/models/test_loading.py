"""What loading a model changes beside it."""

from collections.abc import Iterator

import pytest
import torch

from blockdraft.models import loading


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_cudnn_s_attention_is_left_out_on_cards_alone() -> None:
    loading._leave_cudnn_attention_out("cpu")
    assert torch.backends.cuda.cudnn_sdp_enabled()
    loading._leave_cudnn_attention_out("cuda:1")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
