"""Every line of the doctor: a sound pair has none that is out, a planted mismatch exactly one."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft import LLM
from blockdraft.core import machine
from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import ConfigError, ModelError
from blockdraft.diagnose.doctor import examine as examination
from blockdraft.diagnose.doctor import run_checks
from blockdraft.diagnose.doctor.check import verdict
from blockdraft.diagnose.doctor.examine import examine
from blockdraft.diagnose.doctor.machine_checks import graphs_check, kernels_check, needed_bytes
from blockdraft.diagnose.doctor.offline import _layer_outputs
from blockdraft.diagnose.doctor.pair import read_pair
from blockdraft.kernels import backends
from blockdraft.kernels.cuda import choice
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.models.draft import vocabulary as draft_vocabulary
from blockdraft.models.draft.hydra_head import HeadShape, HydraHead
from blockdraft.models.layers.graphs import Graphs
from blockdraft.speculate.drafters.ngram_table import NGramTable
from tests.clear_pair import MASK, SIGN_LAYER, TAU, add_switch, edit_facts, write_pair
from tests.published import PUBLISHED, shallow, write_published
from tests.small_llm import without_pages
from tests.tiny import HIDDEN_SIZE, VOCAB_SIZE, edit_json, tiny_drafter_folder, tiny_target_folder
from tests.tiny_gguf import write_gguf
from tests.torch_threads import threads

GIB = 2**30


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    target, drafter = write_pair(tmp_path_factory.mktemp("pair"))
    NGramTable.count([([1, 2, 3, 1, 2, 3], 1)]).save(drafter)
    HydraHead(HeadShape(HIDDEN_SIZE, 32, (SIGN_LAYER,), 0.9), torch.arange(5)).save(drafter)
    return target, drafter


@pytest.fixture
def pair(sound, tmp_path):
    """A copy to do harm to."""
    copies = tmp_path / "target", tmp_path / "drafter"
    for source, copy in zip(sound, copies, strict=True):
        shutil.copytree(source, copy)
    return copies


@pytest.fixture(autouse=True)
def idle(monkeypatch):
    """A machine with nothing else to do, however busy this one is."""
    monkeypatch.setattr(examination, "busy_cores", lambda: 0.0)
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 16 * GIB)


def look(pair, *, quick=True, thinking="template", **options):
    config = LLMConfig(
        **{"target": str(pair[0]), "drafter": str(pair[1]), "dtype": "float32", **options}
    )
    found = examine(read_pair(config, thinking), lambda stage, share: None, quick=quick)
    return {check.name: check for check in found.checks}


def names(checks, mark="out"):
    return [name for name, check in checks.items() if check.mark == mark]


def edit_weights(folder, name, change):
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights[name] = change(weights[name])
    save_file(weights, path, {"format": "pt"})


def forget(drafter, *parts):
    for part in parts:
        edit_facts(drafter, part)


def test_a_sound_pair_is_in_order(pair):
    checks = look(pair, quick=False)
    assert names(checks) == names(checks, "unknown") == []
    assert set(checks) == {
        *("pair", "target weights", "chat template", "thinking", "precision"),
        *("rope", "sliding window", "mask token", "layer ids", "vocabulary"),
        *("prefix reuse", "tau, math", "tau, code", "tau, chat", "tau, writing"),
        *("n-grams", "hydra head", "threads", "memory", "other programs", "kernels"),
    }
    assert f"{TAU:.2f}" in checks["tau, math"].found
    assert "128 tokens from the cache" in checks["prefix reuse"].found
    assert "one lower 1." in checks["layer ids"].found
    assert verdict(checks.values()).startswith("NO PROBLEMS")


def test_what_lies_beside_the_weights(pair):
    checks = look(pair)
    assert "contexts" in checks["n-grams"].found
    assert checks["hydra head"].found == f"predicts 5 tokens from layers {SIGN_LAYER}"
    HydraHead(HeadShape(HIDDEN_SIZE, 8, (1, 99), 0.5), torch.arange(5)).save(pair[1])
    checks = look(pair)
    assert names(checks) == ["hydra head"]  # the engine refuses it
    assert checks["hydra head"].found.startswith("reads layers 1, 99, and the drafter ")
    for name in ("ngrams.safetensors", "hydra_head.safetensors"):
        (pair[1] / name).write_bytes(b"cut off")
    assert names(look(pair)) == ["n-grams", "hydra head"]
    assert look(pair, ngrams=False)["n-grams"].found == "switched off"
    for name in ("ngrams.safetensors", "hydra_head.safetensors"):
        (pair[1] / name).unlink()
    checks = look(pair)
    assert names(checks, "warning") == ["n-grams", "hydra head"]
    assert "blockdraft count-ngrams" in checks["n-grams"].remedy
    assert "blockdraft train-head" in checks["hydra head"].remedy


def test_quick_reads_only(pair, monkeypatch):
    monkeypatch.setattr(examination, "LLM", None)
    checks = look(pair)
    assert names(checks) == []
    assert names(checks, "unknown") == ["prefix reuse", "tau"]


def test_without_provenance_much_is_unknown_and_nothing_ok_by_default(pair):
    (pair[1] / "provenance.json").unlink()
    checks = look(pair)
    assert names(checks) == []
    unknown = set(names(checks, "unknown"))
    assert unknown == {"target weights", "chat template", "layer ids", "prefix reuse", "tau"}


def test_another_target(pair):
    edit_weights(pair[0], "lm_head.weight", lambda weight: weight + 0.001)
    checks = look(pair)
    assert names(checks) == ["target weights"]
    assert "fine-tuned" in checks["target weights"].found


def test_a_quantized_target_is_called_so(pair):
    edit_json(
        pair[0] / "config.json",
        quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128},
    )
    forget(pair[1], "target")
    check = look(pair)["target weights"]
    assert (check.mark, "quantized (awq)" in check.found) == ("unknown", True)


def test_another_template(pair):
    path = pair[0] / "chat_template.jinja"
    path.write_text("Be brief. " + path.read_text(encoding="utf-8"), encoding="utf-8")
    assert names(look(pair)) == ["chat template"]


@pytest.mark.parametrize(
    ("trained", "asked", "mark"),
    [("off", "template", "out"), ("off", "on", "out"), ("off", "off", "ok"), ("on", "off", "out"),
     ("on", "template", "ok"), ("template", "off", "out"), ("template", "on", "ok"),
     ("mixed", "off", "ok"), (None, "on", "unknown")],
)  # fmt: skip
def test_thinking_against_the_training(pair, trained, asked, mark):
    edit_facts(pair[1], "target", template_sha256=add_switch(pair[0]), thinking=trained)
    checks = look(pair, thinking=asked)
    assert checks["thinking"].mark == mark
    assert names(checks) == (["thinking"] if mark == "out" else [])


def test_thinking_that_a_template_does_not_know_is_refused(pair):
    with pytest.raises(ConfigError, match="has no such switch"):
        look(pair, thinking="on")


def test_a_run_in_fewer_digits_than_the_training(pair):
    checks = look(pair, dtype="bfloat16")
    assert names(checks) == ["precision"]
    assert "--dtype float32" in checks["precision"].remedy
    assert names(look(pair, dtype="float64")) == []


def test_a_file_in_fewer_digits_than_the_training(pair):
    edit_weights(pair[1], "fc.weight", lambda weight: weight.half())
    checks = look(pair)
    assert names(checks) == ["precision"]
    assert "file is in float16" in checks["precision"].found


def test_a_file_and_a_run_in_fewer_digits_than_the_training(pair):
    """Another --dtype would not bring back what the file has lost."""
    edit_weights(pair[1], "fc.weight", lambda weight: weight.bfloat16())
    line = look(pair, dtype="bfloat16")["precision"]
    assert "the drafter's file is in bfloat16" in line.found
    assert line.remedy == "get the original file"


def test_a_file_whose_precision_no_target_runs_in(pair):
    forget(pair[1], "target")
    edit_weights(pair[1], "fc.weight", lambda weight: weight.half())
    line = look(pair, dtype="bfloat16")["precision"]
    assert line.found.startswith("it runs in bfloat16, its file is in float16")
    assert line.remedy == "give --dtype float32"


def test_the_precision_of_a_gguf_file_is_unknown(tmp_path):
    paths = [tmp_path / name for name in ("target.gguf", "drafter.gguf")]
    for path in paths:
        write_gguf(path)
    line = look(paths)["precision"]
    assert (line.mark, line.remedy) == ("unknown", "")


def test_weights_that_are_no_numbers(pair):
    edit_weights(pair[1], "norm.weight", lambda weight: weight / 0.0)
    checks = look(pair)
    assert names(checks) == ["precision"]
    assert "norm.weight" in checks["precision"].found


@pytest.mark.parametrize("with_facts", [True, False])
def test_a_rotation_that_was_lost(pair, with_facts):
    """The target's base is not the default one, and the drafter's config has none."""
    edit_json(pair[0] / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    raw = json.loads((pair[1] / "config.json").read_text(encoding="utf-8"))
    if with_facts:
        edit_facts(pair[1], "drafter", rope_theta=5e5)
    else:
        forget(pair[1], "drafter")
    del raw["rope_theta"]
    (pair[1] / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    checks = look(pair)
    assert names(checks) == ["rope"]
    assert "500000" in checks["rope"].remedy
    edit_json(pair[1] / "config.json", rope_theta=5e5)
    assert names(look(pair)) == []


def test_a_rotation_unlike_the_target_is_measured(pair):
    edit_json(pair[1] / "config.json", rope_theta=123.0)
    forget(pair[1], "drafter")
    assert look(pair)["rope"].mark == "unknown"
    checks = look(pair, quick=False)
    # Nothing in this drafter depends on where a token stands.
    assert (checks["rope"].mark, names(checks)) == ("ok", [])
    assert "no better" in checks["rope"].found


def test_a_window_that_was_lost(pair):
    assert look(pair)["sliding window"].found == "no sliding window"
    kinds = ["sliding_attention", "full_attention"]
    changes = {"layer_types": kinds, "sliding_window": 32, "use_sliding_window": True}
    edit_facts(pair[1], "drafter", **changes)
    checks = look(pair)
    assert names(checks) == ["sliding window"]
    assert "1 of 2 layers see 32 tokens" in checks["sliding window"].found
    edit_json(pair[1] / "config.json", **changes)
    assert names(look(pair)) == []


def test_a_window_that_no_layer_has(pair):
    forget(pair[1], "drafter")
    raw = json.loads((pair[1] / "config.json").read_text(encoding="utf-8"))
    del raw["use_sliding_window"]
    raw["sliding_window"] = 32
    (pair[1] / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    assert names(look(pair)) == ["sliding window"]


def set_mask(pair, mask):
    path = pair[1] / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    edit_json(path, dflash_config=raw["dflash_config"] | {"mask_token_id": mask})
    forget(pair[1], "drafter")


@pytest.mark.parametrize(
    ("mask", "what"), [(999, "outside the vocabulary"), (262, "chat template")]
)
def test_a_mask_token_that_cannot_stand_for_nothing(pair, mask, what):
    set_mask(pair, mask)
    checks = look(pair, quick=False) if mask == 999 else look(pair)
    assert names(checks) == ["mask token"]
    assert what in checks["mask token"].found


def test_another_mask_token_than_in_training(pair):
    path = pair[1] / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    edit_json(path, dflash_config=raw["dflash_config"] | {"mask_token_id": 270})
    checks = look(pair)
    assert names(checks) == ["mask token"]
    assert str(MASK) in checks["mask token"].found


def test_a_mask_token_of_ordinary_text_is_doubted(pair):
    set_mask(pair, 70)
    checks = look(pair)
    assert (names(checks), names(checks, "warning")) == ([], ["mask token"])


def set_layers(pair, *ids):
    path = pair[1] / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    edit_json(path, dflash_config=raw["dflash_config"] | {"target_layer_ids": list(ids)})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("by", [-1, 1])
def test_layers_off_by_one_are_measured(pair, by):
    """Nothing is written of the training: the features themselves tell."""
    set_layers(pair, SIGN_LAYER + by)
    forget(pair[1], "drafter")
    checks = look(pair, quick=False)
    found = [name for name in names(checks) if not name.startswith("tau")]
    assert found == ["layer ids", "hydra head"]  # the head reads what the drafter should
    assert f"[{SIGN_LAYER}]" in checks["layer ids"].remedy
    assert len(names(checks)) == 6  # and so is every tau


def test_other_layers_than_in_training(pair):
    set_layers(pair, SIGN_LAYER + 1)
    assert names(look(pair)) == ["layer ids", "hydra head"]
    set_layers(pair, 7)
    assert names(look(pair)) == ["layer ids"]


def test_tokens_that_the_tokenizer_does_not_have(pair):
    draft_vocabulary.write_draft_vocabulary(pair[1], [1, 2, 268])
    checks = look(pair)
    assert names(checks) == ["vocabulary"]
    assert "names 1 tokens" in checks["vocabulary"].found


def test_a_vocabulary_that_is_padded_otherwise(pair):
    edit_json(pair[1] / "config.json", vocab_size=320)
    checks = look(pair)
    assert names(checks) == ["vocabulary"]
    assert checks["pair"].mark == "unknown"


def test_guesses_that_are_padding(pair, monkeypatch):
    """The tokenizer ends before the one token that this drafter guesses."""
    real = examination.measure_offline

    def measure(engine, answers, rope, num_tokens):
        return real(engine, answers, rope, 10)

    monkeypatch.setattr(examination, "measure_offline", measure)
    checks = look(pair, quick=False)
    assert names(checks) == ["vocabulary"]
    assert "100% of the draft tokens" in checks["vocabulary"].found


def test_a_target_that_ends_its_answers_at_once(pair, monkeypatch):
    read, run = examination.read_bundled, examination.answer_bundled

    def ended(*arguments):
        first = [replace(one, output_ids=one.output_ids[:1]) for one in run(*arguments)]
        return [replace(one, acceptance=AcceptanceStats()) for one in first]

    monkeypatch.setattr(examination, "read_bundled", lambda: read()[:1])
    monkeypatch.setattr(examination, "answer_bundled", ended)
    checks = look(pair, quick=False)
    assert names(checks) == []
    assert checks["layer ids"].found.endswith("as in training")
    (tau,) = (check for name, check in checks.items() if name.startswith("tau"))
    assert (tau.mark, tau.found) == (
        "unknown",
        "not measured: the target ended every answer after its first token",
    )


def test_a_drafter_for_another_target(pair, tmp_path_factory):
    root = tmp_path_factory.mktemp("other")
    other = tiny_drafter_folder(root, num_target_layers=9, mask_token_id=MASK)
    checks = look((pair[0], other), quick=False)
    assert names(checks) == ["pair"]
    assert "number of target layers" in checks["pair"].found


def test_a_drafter_of_another_kind(pair):
    edit_json(pair[1] / "config.json", conv_kernel_size=2)
    checks = look(pair, quick=False)
    assert names(checks) == ["pair"]
    assert "DFlash 2" in checks["pair"].found
    assert checks["rope"].mark == checks["mask token"].mark == "unknown"


def test_features_lost_behind_a_prompt_from_memory(pair, monkeypatch):
    real = run_checks.decode_alone

    def forgetful(engine, *arguments):
        done = real(engine, *arguments)
        for pool in engine.drafter.contexts.kv.pools:
            pool.zero_()
        return done

    monkeypatch.setattr(run_checks, "decode_alone", forgetful)
    checks = look(pair, quick=False)
    assert names(checks) == ["prefix reuse"]
    assert f"{TAU:.2f} without" in checks["prefix reuse"].found


def test_a_target_that_reuses_nothing(pair, monkeypatch):
    monkeypatch.setattr("blockdraft.models.target.paged.layer_shapes", without_pages)
    checks = look(pair, quick=False)
    assert names(checks) == []
    assert "cannot reuse prompts" in checks["prefix reuse"].found
    assert "one lower 1." in checks["layer ids"].found


def test_less_than_what_the_drafter_promises(pair):
    edit_facts(pair[1], "expected", tau={"math": TAU, "code": 9.0, "chat": 1.0})
    checks = look(pair, quick=False)
    assert names(checks) == ["tau, code"]
    assert checks["tau, writing"].mark == "unknown"


def test_a_drafter_that_is_good_for_nothing(pair):
    forget(pair[1], "expected")
    name = "layers.0.self_attn.o_proj.weight"
    edit_weights(pair[1], name, lambda weight: 0.0 * weight)
    checks = look(pair, quick=False)
    assert [name for name in names(checks) if name.startswith("tau")] == names(checks)
    assert len(names(checks)) == 4


def test_a_drafter_that_promises_next_to_nothing(pair):
    name = "layers.0.self_attn.o_proj.weight"
    edit_weights(pair[1], name, lambda weight: 0.0 * weight)
    edit_facts(pair[1], "expected", tau=dict.fromkeys(("math", "code", "chat", "writing"), 1.05))
    checks = look(pair, quick=False)
    taus = [check for check in checks.values() if check.name.startswith("tau")]
    assert [check.mark for check in taus] == ["out"] * 4
    assert all("train it longer" in check.remedy for check in taus)


def test_fewer_threads_than_the_cores_allow_is_a_warning(pair, monkeypatch):
    monkeypatch.setattr(machine, "num_cpus", lambda: 64)
    with threads(1):
        checks = look(pair)
    assert (names(checks), names(checks, "warning")) == ([], ["threads"])


def test_too_little_memory(pair, monkeypatch):
    checks = look(pair, memory=20.0, quick=False)
    assert names(checks) == ["memory"]
    assert "not enough memory" in checks["prefix reuse"].found
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: None)
    assert look(pair)["memory"].mark == "unknown"


def test_cores_that_others_use_are_a_warning(pair, monkeypatch):
    cores = machine.num_cpus()
    monkeypatch.setattr(examination, "busy_cores", lambda: float(cores))
    checks = look(pair)
    assert (names(checks), names(checks, "warning")) == ([], ["other programs"])
    monkeypatch.setattr(examination, "busy_cores", lambda: None)
    assert look(pair)["other programs"].mark == "unknown"


def test_a_machine_without_a_compiler_is_a_warning(pair, monkeypatch):
    monkeypatch.setattr(backends, "library", lambda: None)
    checks = look(pair)
    assert (names(checks), names(checks, "warning")) == ([], ["kernels"])


def test_a_card_that_emulates_the_precision_is_a_warning(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    found = kernels_check(SimpleNamespace(dtype=torch.bfloat16, device="cuda:1"))
    assert (found.name, found.mark) == ("kernels", "warning")
    assert "the GPU, cuda:1, does not multiply bfloat16 in hardware" in found.found
    assert "--dtype float32" in found.remedy


@pytest.fixture
def card(pair, monkeypatch):
    """The pair on a card that has Triton, and kernels whose check finds what `fault` says."""
    monkeypatch.setattr(choice, "_choices", {})
    monkeypatch.setattr(choice, "find_spec", lambda name: object())
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GIB, 139 * GIB))
    config = LLMConfig(target=str(pair[0]), drafter=str(pair[1]), device="cpu")
    own = SimpleNamespace(pair=replace(read_pair(config, "template"), device="cuda"), fault="")
    backend = SimpleNamespace(attends_over=lambda head_dim: True, in_hardware=True, packs=True)
    monkeypatch.setattr(choice, "_checked", lambda *_: (None if own.fault else backend, own.fault))
    return own


def test_kernels_of_a_card_are_named_with_the_card(card):
    found = kernels_check(card.pair)
    assert found.mark == "ok"
    assert "Triton's (" in found.found
    assert "on cuda (NVIDIA H200, compute capability 9.0, 132 processors)" in found.found


@pytest.mark.parametrize(
    ("left_out_by", "reason", "remedy"),
    [
        ("switch", "BLOCKDRAFT_TRITON=off", "unset BLOCKDRAFT_TRITON"),
        ("package", "triton is not installed", "install it"),
        ("fault", "RuntimeError: no compiler", "Python's headers"),
        ("kv_cache_dtype", "attention by torch", "leave out --kv-cache-dtype int8"),
        ("quantize", "no weights in int4", "leave out --quantize"),
    ],
)
def test_what_left_triton_out_is_named(left_out_by, reason, remedy, card, monkeypatch):
    if left_out_by == "switch":
        monkeypatch.setenv(choice.SWITCH, "off")
    elif left_out_by == "package":
        monkeypatch.setattr(choice, "find_spec", lambda name: None)
    elif left_out_by == "fault":
        card.fault = "RuntimeError: no compiler"
    else:
        value = {"kv_cache_dtype": "int8", "quantize": "int4"}[left_out_by]
        config = replace(card.pair.config, **{left_out_by: value})
        card.pair = replace(card.pair, config=config)
    found = kernels_check(card.pair)
    assert found.mark == "warning"
    assert reason in found.found
    assert remedy in found.remedy


def test_weights_on_a_card_are_there_once(card, pair):
    numbers = sum(weight.numel() for weight in card.pair.target.parameters())
    numbers += card.pair.shape.num_weights
    assert needed_bytes(card.pair) == numbers * card.pair.dtype.itemsize


def test_graphs_that_cannot_be_captured_are_a_warning():
    graphs = {"target": {"rows": [1, 8], "why_not": ""}, "drafter": {"rows": [], "why_not": "no"}}
    assert graphs_check({}) == []
    (found,) = graphs_check(graphs)
    assert (found.mark, found.found) == ("warning", "none of the drafter: no")
    del graphs["drafter"]
    (found,) = graphs_check(graphs)
    assert (found.mark, found.found) == ("ok", "of the target for 1, 8 rows")


def test_layers_are_looked_at_without_graphs(pair, monkeypatch):
    """One that is replayed on a card calls no hook, and nothing would be seen of its layers."""
    llm = LLM(str(pair[0]), str(pair[1]), dtype="float32")
    graphs = Graphs("the target", torch.device("cpu"), torch.clone)
    captured = SimpleNamespace(replay=lambda: pytest.fail("a graph is replayed"))
    graphs._graphs[1] = captured, torch.ones(1)
    forward = llm.engine.target.forward
    monkeypatch.setattr(llm.engine.target, "forward", lambda plan: graphs(1, lambda: forward(plan)))
    states = _layer_outputs(llm.engine, llm.engine.target, [1, 2, 3], [0])
    assert states[0].shape == (3, HIDDEN_SIZE)


def test_there_must_be_a_pair(pair):
    with pytest.raises(ConfigError, match="no drafter"):
        look((pair[0], "none"))
    with pytest.raises(ModelError, match="no model"):
        look((pair[0], "no-such-drafter"))


def test_a_drafter_in_the_speculators_layout_is_read(tmp_path):
    case = shallow(PUBLISHED["speculators, vocabulary of its own"])
    write_published(tmp_path / "drafter", case)
    sizes = {"hidden_size": 40, "num_attention_heads": 4, "head_dim": 8}
    target = tiny_target_folder(tmp_path, "qwen3", **sizes, num_hidden_layers=7)
    edit_json(target / "config.json", vocab_size=VOCAB_SIZE)
    config = LLMConfig(target=str(target), drafter=str(tmp_path / "drafter"), device="cpu")
    pair = read_pair(config, "template")
    assert pair.refusal is None
    assert pair.fields["target_layer_ids"] == case.layer_ids
    assert pair.raw["rope_parameters"]["rope_theta"] == 1000000
