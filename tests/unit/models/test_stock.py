"""transformers' own decoding, as a baseline: of the request alone, whatever a folder says."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.bench.outside.engines import WORKERS
from blockdraft.core.request import SamplingParams
from blockdraft.models.target.stock import StockModel
from tests.tiny import edit_json, tiny_target_folder

PROMPT = [5, 6, 7, 8]
PENALTIES = {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2}


def stock_tokens(folder: Path, **asked: Any) -> tuple[int, ...]:
    stock = StockModel(folder, torch.float32, "cpu", [])
    return stock.generate(PROMPT, SamplingParams(max_tokens=20, **asked))


def worker_tokens(folder: Path) -> tuple[int, ...]:
    """By the process that `bench --against transformers` starts, here without one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(WORKERS), *sys.path])
        from run_transformers import load  # type: ignore[import-not-found]  # a script

        patch.setattr(torch, "set_num_threads", lambda number: None)
        decode = load(
            {
                "target": str(folder),
                "method": "plain",
                "dtype": "float32",
                "device": "cpu",
                "threads": 1,
                "eos_ids": [],
                "trust_remote_code": False,
            }
        )
    return tuple(decode(PROMPT, 20)["token_ids"])


@pytest.mark.parametrize("decoded", [stock_tokens, worker_tokens])
def test_penalties_of_a_folder_do_not_count(tmp_path: Path, decoded: Any) -> None:
    folder = tiny_target_folder(tmp_path)
    expected = decoded(folder)
    edit_json(folder / "generation_config.json", **PENALTIES)
    assert decoded(folder) == expected


def test_ends_of_a_folder_do_not_count_where_none_is_asked_for(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    expected = stock_tokens(folder, ignore_eos=True)
    edit_json(folder / "generation_config.json", eos_token_id=expected[3])
    assert stock_tokens(folder, ignore_eos=True) == expected
