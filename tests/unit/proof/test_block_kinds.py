"""`blockdraft prove` with successors of DFlash, chains and trees: no difference, faults found."""

from pathlib import Path
from typing import Any

import pytest

from blockdraft.proof.config import ProofConfig
from blockdraft.proof.corpus import ProofPrompt
from blockdraft.proof.prove import Proof
from tests.small_llm import assert_nothing_left, load_llm
from tests.tiny import DFLASH2, LAYER_FUSIONS, PATH_HEADS, tiny_drafter_folder, tiny_target_folder

CONFIG = ProofConfig(
    max_tokens=10, num_settings=2, num_context_cases=1, num_stock_prompts=1, num_draws=1000
)
CORPUS = [ProofPrompt("a", "short", "the abc"), ProofPrompt("b", "raw", "!!\tthe\n" * 9, raw=True)]


SHAPES: dict[str, Any] = {
    "dflash2": {"dflash2": DFLASH2},
    "dspark": PATH_HEADS["dspark"],
    "domino": PATH_HEADS["domino"],
    "dfly": LAYER_FUSIONS["dfly"],
    "dflare": LAYER_FUSIONS["dflare"],
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("num_draft_tokens", [None, 12], ids=["chain", "tree"])
def test_a_pair_is_proven(tmp_path: Path, kind: str, num_draft_tokens: int | None) -> None:
    folders = tiny_target_folder(tmp_path), tiny_drafter_folder(tmp_path, **SHAPES[kind])
    llm = load_llm(folders, num_draft_tokens=num_draft_tokens)
    assert llm.engine.drafter.kind == kind
    findings = Proof(llm, CONFIG, CORPUS).run()
    assert findings.failures == []
    assert findings.verdict == "proven"
    assert all(control.caught for control in findings.controls)
    assert findings.ways[0].acceptance.drafted
    assert_nothing_left(llm)
