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


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        *(((major, minor), torch.float32) for major, minor in ((6, 1), (7, 0), (7, 5))),
        *(((major, minor), torch.bfloat16) for major, minor in ((8, 0), (8, 6), (9, 0), (12, 0))),
    ],
)
def test_a_card_that_emulates_bfloat16_runs_in_float32(
    capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: asked.append(device) or capability
    )
    assert loading.resolve_dtype("auto", "cuda:1") == dtype
    assert asked == ["cuda:1"]
    assert loading.resolve_dtype("bfloat16", "cuda:1") == torch.bfloat16


def test_cudnn_s_attention_is_left_out_on_cards_alone(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    loading.load_target_model(folder, torch.float32, "cpu")
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with patch("transformers.PreTrainedModel.to", lambda model, device: model):
        loading.load_target_model(folder, torch.float32, "cuda:1")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
