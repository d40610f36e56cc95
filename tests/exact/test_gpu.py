"""On a GPU: rows do not depend on their company, and drafted output equals plain output.

Skips itself without one. Where rows depend on their company, the engine refuses to run exactly.
"""

import os
import random
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from blockdraft import LLM
from blockdraft.core.request import SamplingParams
from blockdraft.kernels.backends import card_kernels
from blockdraft.kernels.cuda.choice import SWITCH
from blockdraft.measure.graphs import describe_graphs
from blockdraft.models.target.loading import settle_device
from blockdraft.models.target.paged import PagedTarget
from blockdraft.proof.faults import attention_by_company
from tests.fakes import NoisyOracleDrafter
from tests.parity.checks import (
    check_drafted_equals_plain,
    check_together_equals_alone,
    generate,
    generate_plain,
)
from tests.parity.targets import WAYS, Way, make_dflash, make_target
from tests.tiny import (
    KINDS,
    VOCAB_SIZE,
    tiny_drafter,
    tiny_drafter_folder,
    tiny_target,
    tiny_target_folder,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def settled() -> None:
    """As a load does; models are made without one here."""
    settle_device("cuda")


@pytest.fixture
def has_triton() -> None:
    if find_spec("triton") is None or os.environ.get(SWITCH) == "off":
        pytest.skip("without Triton")


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("has_triton")
def test_triton_kernels_are_used(dtype: torch.dtype, head_dim: int) -> None:
    """Most other tests pass with torch's operations, too."""
    assert card_kernels(dtype, "cuda", [head_dim]) == (True, "")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_their_company(kind: str, dtype: torch.dtype, way: Way) -> None:
    make_target(way, tiny_target(kind, dtype).cuda()).check_row_invariance()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_drafted_equals_plain(kind: str, dtype: torch.dtype, way: Way, temperature: float) -> None:
    draw = random.Random(0)
    target = make_target(way, tiny_target(kind, dtype).cuda())
    dflash = make_dflash(target, tiny_drafter(dtype, block_size=8).cuda())
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=1, logprobs=8)
    for drafter in (dflash, NoisyOracleDrafter(7, VOCAB_SIZE)):
        prompt = [draw.randrange(VOCAB_SIZE) for _ in range(70)]
        check_drafted_equals_plain(target, drafter, prompt, params)


@pytest.mark.usefixtures("has_triton")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_change_nothing(kind: str, dtype: torch.dtype) -> None:
    """Of target and drafter. What cannot be captured runs without a graph, slowly, and is found."""
    draw, params = random.Random(2), SamplingParams(max_tokens=40)
    prompt = [draw.randrange(VOCAB_SIZE) for _ in range(70)]
    plain = generate_plain(make_target("paged", tiny_target(kind, dtype).cuda()), prompt, params)
    target = make_target("paged", tiny_target(kind, dtype).cuda())
    assert isinstance(target, PagedTarget)
    assert target.use_static_shapes()
    dflash = make_dflash(target, tiny_drafter(dtype, block_size=8).cuda())
    assert generate(target, dflash, prompt, params).token_ids == plain.token_ids
    assert generate_plain(target, prompt, params).token_ids == plain.token_ids
    assert target._static is not None
    assert dflash._kernel_draft is not None
    assert dflash._kernel_draft._static is not None
    for graphs in (target._static.graphs, dflash._kernel_draft._static.graphs):
        assert graphs.captures
        assert graphs.shapes


@pytest.mark.usefixtures("has_triton")
def test_what_waits_is_not_captured() -> None:
    """Experts count their rows on the host. torch's memory can be given back afterwards."""
    target = make_target("paged", tiny_target("qwen3_moe").cuda())
    assert isinstance(target, PagedTarget)
    assert target.use_static_shapes()
    assert generate_plain(target, [1, 2, 3], SamplingParams(max_tokens=5)).token_ids
    assert target._static is not None
    assert not target._static.graphs.captures
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_batch_changes_nothing(dtype: torch.dtype) -> None:
    draw = random.Random(1)
    oracle = make_target("sequential", tiny_target("llama", dtype).cuda())
    target = make_target("paged", tiny_target("llama", dtype).cuda())
    dflash = make_dflash(target, tiny_drafter(dtype, block_size=8).cuda())
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(n)] for n in (1, 20, 64, 65, 130)]
    check_together_equals_alone(target, dflash, oracle, prompts, SamplingParams(max_tokens=40))


@pytest.mark.usefixtures("has_triton")
def test_a_planted_fault_shows_beside_graphs_and_leaves_none(tmp_path: Path) -> None:
    """As in `prove`: a graph replays what it was captured with, whatever is planted later."""
    folders = str(tiny_target_folder(tmp_path)), str(tiny_drafter_folder(tmp_path))
    llm = LLM(*folders, dtype="float32", device="cuda", adaptive=False)
    drafted = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=8)
    plain = replace(drafted, num_draft_tokens=0)

    def outputs() -> list[object]:
        prompt = list(range(3, 40))
        found = [llm.generate(prompt, params).completions[0] for params in (plain, drafted)]
        return [(one.token_ids, one.logprobs) for one in found]

    expected = outputs()
    assert expected[0] == expected[1]
    with attention_by_company(llm.engine):
        first, other = outputs()
        assert first != other
    assert outputs() == expected
    graphs = describe_graphs(llm.engine.target, llm.engine.drafter)
    assert list(graphs) == ["target", "drafter"]
    assert all(own["rows"] and not own["why_not"] for own in graphs.values())
