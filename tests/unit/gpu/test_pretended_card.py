"""What runs on a card is made on the card: held to it by a card that is none."""

import json
import logging
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpucheck.notes import Notes
from gpucheck.parts import part_named
from gpucheck.settings import settings_for
from torch.overrides import _pop_mode_temporarily
from transformers import PreTrainedModel

from blockdraft import LLM, Grammar, SamplingParams
from blockdraft.core.config import LLMConfig
from blockdraft.core.plan import ROOT, Tree
from blockdraft.core.sequence import Sequence
from blockdraft.engine import load as load_module
from blockdraft.kernels.torch.backend import TorchBackend
from blockdraft.models.attention.plan import AttentionPlan
from blockdraft.speculate.drafters.slots import Guessable, candidates_of, candidates_of_all
from blockdraft.speculate.sampler import choose as choose_module
from blockdraft.speculate.sampler.choose import Walk
from blockdraft.train.trainer import train
from tests.parity.checks import generate
from tests.parity.targets import WAYS, Way, make_dflash, make_target
from tests.pretend_cuda import PretendCuda, WrongDevice
from tests.tiny import (
    KINDS,
    PATH_HEADS,
    tiny_drafter,
    tiny_drafter_folder,
    tiny_target,
    tiny_target_folder,
)
from tests.train_runs import small_config

PARAMS = SamplingParams(max_tokens=10, ignore_eos=True, seed=1)
ASKED = {
    "greedy": PARAMS,
    "sampled": replace(PARAMS, temperature=0.8, top_p=0.9, logprobs=2),
    "penalties": replace(PARAMS, repetition_penalty=1.2, logit_bias={7: 1.0}),
    "grammar": SamplingParams(max_tokens=10, grammar=Grammar.regex("[ab ]+"), seed=1),
    "prompt scores": replace(PARAMS, logprobs=1, prompt_logprobs=True),
}


@pytest.fixture(autouse=True)
def card(monkeypatch):
    """A card that has some memory, a name, and bfloat16."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (2**28, 2**28))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "pretended")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    properties = SimpleNamespace(name="pretended", major=9, minor=0, multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *device: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    # transformers loads to the CPU, and under another mode leaves some buffers without values.
    load_model = PreTrainedModel.from_pretrained.__func__

    def from_pretrained(*args, **options):
        with _pop_mode_temporarily():
            return load_model(*args, **options)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
    with PretendCuda():
        yield


@pytest.fixture
def folders(tmp_path) -> tuple[str, str]:
    return str(tiny_target_folder(tmp_path)), str(tiny_drafter_folder(tmp_path))


def load(folders: tuple[str, str], **options: object) -> LLM:
    return LLM(*folders, dtype="float32", device="cuda", memory=0.1, **options)


def sample_of(**params: float) -> Sequence:
    asked = SamplingParams(max_tokens=8, **params)
    return Sequence(0, asked, 7, 0, frozenset(), token_ids=[1, 2], num_prompt=2)


def kept_quiet(caplog) -> list[str]:
    """Failures of one row or of a drafter, without which the others go on."""
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


def test_devices_do_not_mix():
    there = torch.zeros(3, device="cuda")
    assert there.device.type == (there + 1).device.type == "cuda"
    assert there.cpu().device.type == "cpu"
    for wrong in (lambda: there + torch.ones(3), there.numpy):
        with pytest.raises(WrongDevice):
            wrong()


def test_a_tensor_on_the_wrong_device_is_found(folders, monkeypatch):
    ranges = AttentionPlan._ranges
    monkeypatch.setattr(AttentionPlan, "_ranges", lambda *args: ranges(*args).cpu())
    with pytest.raises(Exception, match="on cuda and on the CPU"):
        load(folders)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{}, {"adaptive": False, "num_draft_tokens": 12}], ids=str)
def test_a_pair_is_served(folders, options, caplog):
    llm = load(folders, exact=False, **options)  # no CPU promises it with a card's operations
    assert llm.engine.target.model.device.type == "cuda"
    for params in ASKED.values():
        found = llm.generate(["the abc", "ab"], [params, replace(params, seed=2)])
        assert all(one.completions[0].token_ids for one in found)
    assert kept_quiet(caplog) == []


@pytest.mark.parametrize("name", ["rnn", "domino", "dfly"])
def test_a_path_head_drafts(name, tmp_path, caplog):
    drafter = tiny_drafter_folder(tmp_path, **PATH_HEADS[name])
    folders = str(tiny_target_folder(tmp_path)), str(drafter)
    llm = load(folders, exact=False, adaptive=False, num_draft_tokens=12)
    for params in ASKED.values():
        found = llm.generate(["the abc", "ab"], [params, replace(params, seed=2)])
        assert all(one.completions[0].acceptance.num_drafted for one in found)
    assert kept_quiet(caplog) == []


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_target_decodes(kind: str, way: Way, caplog):
    target = make_target(way, tiny_target(kind).cuda())
    dflash = make_dflash(target, tiny_drafter(block_size=8).cuda())
    for temperature in (0.0, 1.0):
        params = replace(PARAMS, temperature=temperature, logprobs=2)
        assert len(generate(target, dflash, range(70), params).token_ids) == PARAMS.max_tokens
    assert kept_quiet(caplog) == []


def test_one_wait_serves_the_slots_of_all_rows(monkeypatch):
    asked, largest = [], TorchBackend.largest

    def counted(backend, scores, num):
        asked.append(scores.shape[0])
        return largest(backend, scores, num)

    monkeypatch.setattr(TorchBackend, "largest", counted)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(num, 50, generator=generator).cuda() for num in (3, 1, 2)]
    together = candidates_of_all(parts, Guessable(50))
    assert asked == [6]
    for found, part in zip(together, parts, strict=True):
        for own, alone in zip(found, candidates_of(part, Guessable(50)), strict=True):
            assert own.tolist() == alone.tolist()
    assert candidates_of_all([], Guessable(50)) == []


def test_noise_is_added_on_the_host(monkeypatch):
    """One copy of logits serves all rows, and those that nobody asks for are not chosen."""
    chosen, by_kernel = [], choose_module._by_kernel

    def noted(walk, index):
        chosen.append((walk.logits.device.type, index))
        return by_kernel(walk, index)

    monkeypatch.setattr(choose_module, "_by_kernel", noted)
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    tree = Tree((1, 2, 3), (ROOT, 0, 1))

    def choices_of(logits):
        samples = [sample_of(temperature=1.0), sample_of(temperature=0.0)]
        walks = [Walk.tree(logits, sample, tree) for sample in samples]
        choosers = choose_module.choose(walks)
        assert len(chosen) == 1  # the first row of the sampled one
        found = [[choice_at(index) for index in range(4)] for choice_at in choosers]
        chosen.clear()
        return found

    expected = choices_of(logits)
    assert choices_of(logits.cuda()) == expected
    choose_module.choose([Walk.tree(logits.cuda(), sample_of(temperature=1.0), tree)])
    assert chosen == [("cpu", 0)]


def test_states_for_other_requests_take_a_share_of_the_card(monkeypatch):
    given = {}

    def noted(model, pages, **options):
        given.update(options)

    monkeypatch.setattr(load_module, "PagedTarget", noted)
    load_module.make_target(LLMConfig(), tiny_target().cuda(), None)
    assert given["state_bytes"] == int(load_module.SHARE_OF_STATES * 2**28)


@pytest.mark.parametrize("architecture", ["dflash", "dflash2"])
def test_a_drafter_is_trained(tmp_path: Path, architecture, caplog):
    config = small_config(
        tmp_path, device="cuda", attention="dense", architecture=architecture, max_steps=2,
    )  # fmt: skip
    assert train(config).num_steps
    assert kept_quiet(caplog) == []


FEW = {
    "device": "cuda",
    "dtypes": ("bfloat16",),
    "rows": (1, 3),
    "tiled_rows": (1, 5),
    "tiles": (4,),
    "batches": (1, 2),
    "pages": (2, 3),
    "concurrency": (2,),
    "profiled": (1,),
}


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:CUDA is not available")  # says the profiler, rightly
@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("environment", "ceilings"),
        ("rows", "number of linear"),
        ("speed", "transformers"),
        ("ledger", "steps"),
    ],
)
def test_the_check_of_a_card_runs(name: str, last: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    make = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": make())
    monkeypatch.setattr("gpucheck.clock.CALLS", 1)
    settings = replace(settings_for(tmp_path, is_rehearsal=True), **FEW)
    notes = Notes(tmp_path / f"{name}.found.json")
    import_module(part_named(name).module).run(settings, notes)
    assert "error" not in json.dumps(notes.found)
    assert last in notes.found
