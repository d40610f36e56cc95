"""The certificate: what was proven of what, where and how, as plain values for JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blockdraft.llm import LLM
from blockdraft.measure.identity import (
    describe_setting,
    hash_code,
    hash_kernels,
    hash_model,
    hash_text,
    hash_tokenizer,
)
from blockdraft.proof.cases import Case
from blockdraft.proof.config import ProofConfig
from blockdraft.proof.corpus import ProofPrompt
from blockdraft.proof.findings import Findings, WayCheck
from blockdraft.proof.replay import FORMAT, KIND
from blockdraft.proof.ways import Output


def describe_proof(llm: LLM, config: ProofConfig, prompt_files: Sequence[Path]) -> dict[str, Any]:
    """The part that is known before anything has run."""
    assert llm.drafter_folder is not None
    return {
        "kind": KIND,
        "format": FORMAT,
        **describe_setting(llm),
        "drafter_folder": str(llm.drafter_folder),
        "proof": asdict(config) | {"prompts": [str(path.absolute()) for path in prompt_files]},
        "hashes": {
            "target": hash_model(llm.folder),
            "drafter": hash_model(llm.drafter_folder),
            "tokenizer": hash_tokenizer(llm.folder),
            "chat_template": hash_text(llm.tokenizer.chat_template),
            "code": hash_code(),
            "kernels": hash_kernels(),
        },
    }


def make_certificate(description: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """The whole certificate, of a proof that has ended or of as much as there is."""
    prompts: dict[str, ProofPrompt] = {c.prompt.id: c.prompt for c in findings.chosen.cases}
    description = dict(description)
    hashes = description["hashes"] | {"prompts": hash_prompts(list(prompts.values()))}
    return {
        **description,
        "hashes": hashes,
        "verdict": findings.verdict,
        "partial": not findings.is_whole,
        "failures": findings.failures,
        "seconds": findings.seconds,
        "num_differences": sum(len(check.differences) for check in findings.ways),
        "left_out": dict(findings.chosen.left_out),
        "checks": [_check(check) for check in findings.ways],
        "draft_context": [asdict(c) | {"is_right": c.is_right} for c in findings.contexts],
        "noise": None if findings.noise is None else asdict(findings.noise),
        "controls": [asdict(control) for control in findings.controls],
        "distribution": [asdict(c) | {"is_right": c.is_right} for c in findings.distributions],
        "transformers": [asdict(agreement) for agreement in findings.agreements],
        "cases": [_case(case, findings.plain.get(case)) for case in findings.chosen.cases],
    }


def _check(check: WayCheck) -> dict[str, Any]:
    return {
        "name": check.way.name,
        "about": check.way.about,
        "num_cases": check.num_cases,
        "num_tokens": check.num_tokens,
        "num_failures": check.num_failures,
        "drafted_by": dict(sorted(check.acceptance.drafted_by.items())),
        "acceptance_length": check.acceptance.acceptance_length,
        "lacks": list(check.lacks),
        "differences": [asdict(difference) for difference in check.differences],
    }


def _case(case: Case, output: Output | None) -> dict[str, Any]:
    """What was asked, and a hash of what plain decoding answered; None if it has not yet."""
    params = asdict(case.params)
    return {
        "id": case.id,
        "kind": case.prompt.kind,
        "setting": case.setting,
        "num_prompt_tokens": len(case.prompt_ids),
        "params": params,
        "output": None if output is None else hash_output(output),
        "text": None if output is None else output[0].text,
    }


def hash_output(output: Output) -> str:
    """SHA-256 of tokens, texts, ends and log-probabilities of all samples."""
    samples = []
    for sample in output:
        values = asdict(sample)
        del values["acceptance"], values["num_reused"]
        samples.append(values)
    return hash_value(samples)


def hash_prompts(prompts: Sequence[ProofPrompt]) -> str:
    """SHA-256 over what is asked; the same as that of certificates which know no system message."""
    return hash_value([_facts(prompt) for prompt in prompts])


def _facts(prompt: ProofPrompt) -> dict[str, Any]:
    facts = asdict(prompt)
    if prompt.system is None:
        del facts["system"]
    return facts


def hash_value(value: Any) -> str:
    """SHA-256 of plain values. Floats count to the last bit: JSON writes them to be read back."""
    return hash_text(json.dumps(value, sort_keys=True))
