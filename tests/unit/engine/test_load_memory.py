"""How much memory an engine plans for, and that the least it accepts is enough to run in."""

import gc
import re
import weakref
from functools import wraps
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from blockdraft import LLM, SamplingParams
from blockdraft.cache.paged_kv import page_bytes
from blockdraft.core.errors import ConfigError
from blockdraft.engine import load, memory_plan
from blockdraft.engine.memory_plan import MIN_PAGES
from blockdraft.models.draft.paged_context import PagedContexts
from blockdraft.models.target import paged
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.paged_support import layer_shapes
from tests.parity.test_architectures import RECURRENT, build
from tests.tiny import (
    tiny_draft_config,
    tiny_drafter_folder,
    tiny_target_folder,
    tiny_tokenizer,
)

GIB = 2**30


def gib_of(num_pages: float, llm: LLM) -> float:
    """Memory of pages of target and drafter."""
    target = llm.engine.target
    assert isinstance(target, PagedTarget)
    shapes = [*layer_shapes(target.model), *PagedContexts.shapes(tiny_draft_config())]
    return num_pages * page_bytes(shapes, target.model.dtype) / GIB


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_least_memory_is_enough(tmp_path: Path, adaptive: bool) -> None:
    """The self-test, the measurement of costs and a request fit in it."""
    folders = str(tiny_target_folder(tmp_path)), str(tiny_drafter_folder(tmp_path))
    ample = LLM(*folders, dtype="float32", adaptive=False)
    params = SamplingParams(max_tokens=70)
    expected = ample.generate([1, 2, 3], params)
    memory = gib_of(MIN_PAGES + 0.5, ample)
    llm = LLM(*folders, dtype="float32", memory=memory, adaptive=adaptive)
    assert llm.engine.target.memory.num_pages == MIN_PAGES
    assert llm.generate([1, 2, 3], params).completions[0].text == expected.completions[0].text
    with pytest.raises(ConfigError, match=f"{MIN_PAGES} are needed; give --memory"):
        LLM(*folders, dtype="float32", memory=gib_of(MIN_PAGES - 0.5, ample))


@pytest.mark.parametrize("num_layers", [4, 5])
def test_the_memory_that_a_refusal_asks_for_is_enough(tmp_path: Path, num_layers: int) -> None:
    folder = tiny_target_folder(tmp_path, num_hidden_layers=num_layers)
    with pytest.raises(ConfigError) as refused:
        LLM(folder, None, dtype="float32", memory=1e-9)
    (asked,) = re.findall(r"give --memory (\S+) or more", str(refused.value))
    llm = LLM(folder, None, dtype="float32", memory=float(asked))
    assert llm.engine.target.memory.num_pages == MIN_PAGES


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("context", [64, 512])
def test_a_short_context_and_one_sequence_at_a_time(
    tmp_path: Path, context: int, adaptive: bool
) -> None:
    llm = LLM(
        str(tiny_target_folder(tmp_path, max_position_embeddings=context)),
        str(tiny_drafter_folder(tmp_path)),
        dtype="float32",
        max_concurrency=1,
        adaptive=adaptive,
    )
    generation = llm.generate([1, 2, 3], SamplingParams(max_tokens=context - 3, ignore_eos=True))
    assert len(generation.completions[0].token_ids) == context - 3


def test_no_more_is_planned_than_all_sequences_can_fill(tmp_path: Path) -> None:
    llm = LLM(str(tiny_target_folder(tmp_path)), None, dtype="float32", max_concurrency=3)
    assert llm.engine.target.memory.num_pages == 1 + 3 * 512 // 64


def test_memory_cannot_be_kept_to_beside_states(tmp_path: Path) -> None:
    """The copies of states for each candidate are not planned."""
    build("Lfm2", RECURRENT["Lfm2"], torch.float32).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"keeps recurrent states .*; leave out --memory"):
        LLM(tmp_path, None, dtype="float32", memory=1.0)


WHERE_IT_RUNS_OUT = {
    "kernels' own check": (load, "start_key"),
    "weights": (AutoModelForCausalLM, "from_pretrained"),
    "paged forward": (LlamaForCausalLM, "forward"),
    "pages": (paged, "PagedKV"),
    "row check": (PagedTarget, "logits_of_split"),
}


@pytest.mark.parametrize("where", WHERE_IT_RUNS_OUT)
def test_a_lack_of_memory_is_no_fault_of_model_or_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Nobody is told to fetch the model again, and nothing is loaded once more without kernels."""
    monkeypatch.setattr(load, "failed_load", lambda *_: pytest.fail("the kernels are blamed"))
    folders = str(tiny_target_folder(tmp_path)), str(tiny_drafter_folder(tmp_path))

    place = WHERE_IT_RUNS_OUT[where]

    @wraps(getattr(*place))
    def run_out(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(*place, run_out)
    with pytest.raises(ConfigError, match=r"^memory ran out \(.+\); take a smaller model, --quant"):
        LLM(*folders, dtype="float32", recheck=True)


def test_what_torch_keeps_on_a_card_is_free(monkeypatch):
    """Else a model that is loaded once more would have less memory for keys and values."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 120)
    assert memory_plan.bytes_of(torch.device("cuda:1")) == 100 + 500 - 120


def test_a_model_that_was_dropped_makes_room_on_a_card(tmp_path: Path, monkeypatch) -> None:
    """It holds itself, and torch keeps the memory of its graphs."""
    folder, given_back = tiny_target_folder(tmp_path), []
    llm = LLM(folder, None, dtype="float32", exact=False)
    dropped = weakref.ref(llm.engine.target.model)
    monkeypatch.setattr(load, "_uses_cards", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(dropped() is None))
    gc.collect()
    gc.disable()
    try:
        del llm
        LLM(folder, None, dtype="float32", exact=False)
    finally:
        gc.enable()
    assert given_back == [True]
