"""What loading a model changes beside it."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from blockdraft.models.target import loading
from tests.tiny import tiny_target_folder


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_cudnn_s_attention_is_left_out_on_cards_alone(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    loading.load_target_model(folder, torch.float32, "cpu")
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with patch("transformers.PreTrainedModel.to", lambda model, device: model):
        loading.load_target_model(folder, torch.float32, "cuda:1")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
