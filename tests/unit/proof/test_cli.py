"""`blockdraft prove` as a command: exit codes, certificate, page, replay, interruption."""

import errno
import json
import os
import re
from dataclasses import asdict, fields
from functools import partial
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.cli import prove as command
from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import DISK_FAILED, INTERRUPTED, BlockdraftError, ConfigError
from blockdraft.kernels.cpu.backend import NativeBackend
from blockdraft.kernels.cpu.build import COMPILE_FLAGS
from blockdraft.kernels.cpu.library import library
from blockdraft.proof import faults
from blockdraft.proof.config import ProofConfig
from blockdraft.proof.controls import CONTROLS
from blockdraft.proof.page import make_page
from blockdraft.proof.prove import Proof
from blockdraft.proof.replay import compare, read_certificate, settings_of
from blockdraft.proof.summary import sections, verdict_line
from tests import command_line
from tests.tiny import tiny_drafter_folder

CORPUS = [
    {"id": "a", "kind": "short", "prompt": "the abc <|end|> & <td class='x'>"},
    {"id": "b", "kind": "raw", "prompt": "!!\tthe   \n" * 9, "raw": True},
    {"id": "c", "kind": "one", "prompt": "a", "raw": True, "take": 1},
    {"id": "d", "kind": "other", "prompt": "the !! abc"},
    {"id": "e", "kind": "more", "prompt": "é ü 🦊"},
]


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path_factory):
    """A corpus of five prompts, and hardly any draws."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, CORPUS)), encoding="utf-8")
    monkeypatch.setattr(command, "BUNDLED", path)
    monkeypatch.setattr(
        command, "QUICK", command.QUICK | {"max_tokens": 10, "num_draws": 800, "num_settings": 2}
    )


prove = partial(command_line.run, "prove")
prove_json = partial(command_line.run_json, "prove")
refusal = partial(command_line.refusal, "prove")


def test_a_proof_leaves_a_certificate_and_a_page(pair, tmp_path):
    path, page = tmp_path / "c.json", tmp_path / "c.html"
    result = prove("--quick", *pair, "--output", path, "--html", page)
    assert result.exit_code == 0, result.output
    assert "PROVEN" in result.stdout
    assert "one token too many" in result.stdout
    found = json.loads(path.read_text(encoding="utf-8"))
    assert (found["verdict"], found["partial"], found["num_differences"]) == ("proven", False, 0)
    assert {len(value) for value in found["hashes"].values()} == {64}
    assert set(found["hashes"]) == {
        "target", "drafter", "tokenizer", "chat_template", "code", "prompts", "kernels",
    }  # fmt: skip
    kernels = found["kernels"]
    assert kernels["used"] == (library() is not None)
    if kernels["used"]:
        assert re.search(r"(GCC|clang).* \d+\.\d+", kernels["compiler"])
        assert set(COMPILE_FLAGS) <= set(kernels["flags"].split())
    assert {"versions", "machine", "command", "threads", "config", "proof"} <= set(found)
    assert all(control["caught"] for control in found["controls"])
    assert len(found["cases"]) == 2 * len(CORPUS)
    assert page.read_bytes().decode() == make_page(found)


@pytest.mark.parametrize(
    ("temperatures", "words"),
    [
        ((0.0, 0.7), "bit for bit"),
        ((0.0, 0.0), "bit for bit, in greedy requests; no sampled request was tested"),
        ((0.7, 1.0), "bit for bit, in sampled requests; no greedy request was tested"),
    ],
)
def test_a_verdict_names_what_no_case_has_tested(temperatures, words):
    cases = [{"params": {"temperature": temperature}} for temperature in temperatures]
    line = verdict_line({"verdict": "proven", "cases": cases})
    assert line == f"PROVEN: drafted output equals plain output, {words}"


def test_a_disk_that_fills_up_costs_the_file_and_not_the_proof(pair, tmp_path, monkeypatch):
    def fill_the_disk(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("blockdraft.cli.output.write_whole", fill_the_disk)
    result = prove("--quick", *pair, "--output", tmp_path / "c.json")
    assert result.exit_code == DISK_FAILED
    assert "PROVEN" in result.stdout
    assert "free space there, or name another file; the proof continues" in result.stderr


def test_json_is_the_certificate(pair, tmp_path):
    path = tmp_path / "c.json"
    result = prove("--quick", *pair, "--json", "--output", path)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.one_in(8)
@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_an_engine_with_a_fault_exits_with_1(pair, monkeypatch, control):
    real = Proof.run

    def run(self):
        with control.plant(self.llm.engine):
            return real(self)

    monkeypatch.setattr(Proof, "run", run)
    result = prove("--quick", *pair, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["verdict"] == "failed"
    where = "draft context" if control.check == "draft context" else "outputs differ"
    assert where in found["failures"][0]


@pytest.mark.slow
def test_a_drafter_of_noise_changes_nothing(folders, tmp_path):
    target, drafter = folders[0], tiny_drafter_folder(tmp_path)
    path = drafter / "model.safetensors"
    weights = load_file(path)
    save_file({name: 50.0 * weight.roll(1) for name, weight in weights.items()}, path)
    options = ["--target", target, "--drafter", drafter, "--dtype", "float32"]
    assert prove_json("--quick", *options)["num_differences"] == 0


@pytest.mark.slow
def test_with_exact_off_near_ties_are_no_failure(pair):
    found = prove_json("--quick", *pair, "--exact", "off")
    assert found["verdict"] == "no-violation"
    assert found["noise"]["num_positions"] > 20
    skipped = [control["name"] for control in found["controls"] if control["skipped"]]
    assert skipped == ["attention by neighbors"]
    assert all(c["caught"] for c in found["controls"] if not c["skipped"])


@pytest.mark.slow
def test_a_replay_gives_the_same_outputs(pair, tmp_path):
    path, again = tmp_path / "c.json", tmp_path / "again.json"
    assert prove("--quick", *pair, "--seed", 7, "--output", path).exit_code == 0
    result = prove("--replay", path, "--output", again)
    assert result.exit_code == 0, result.output
    before, now = (json.loads(one.read_text(encoding="utf-8")) for one in (path, again))
    assert now["replay"]["changes"] == []
    assert now["replay"]["num_compared"] == len(before["cases"])
    assert now["proof"] == before["proof"]
    assert now["proof"]["seed"] == 7


@pytest.mark.slow
def test_a_replay_says_what_is_another(pair, folders, tmp_path):
    path = tmp_path / "c.json"
    assert prove("--quick", *pair, "--output", path).exit_code == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    found["versions"]["torch"] = "1.0"
    found["hashes"]["drafter"] = "0" * 64
    path.write_text(json.dumps(found), encoding="utf-8")
    result = prove("--replay", path)
    assert result.exit_code == 0, result.output
    assert "versions: torch" in result.stdout
    assert f"hashes: drafter  was {'0' * 12}, is " in result.stdout
    found["cases"][1]["output"] = "0" * 64
    path.write_text(json.dumps(found), encoding="utf-8")
    result = prove("--replay", path, "--json")
    assert result.exit_code == 1
    changes = json.loads(result.stdout)["replay"]["changes"]
    assert [change["name"] for change in changes if change["area"] == "outputs"] == [
        found["cases"][1]["id"]
    ]


@pytest.mark.slow
def test_a_replay_names_other_kernels(pair, tmp_path, without_kernels, monkeypatch):
    path, made = tmp_path / "c.json", tmp_path / "kernels.so"
    assert prove("--quick", *pair, "--output", path).exit_code == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["kernels"] == {
        "used": False, "compiler": None, "flags": None, "matrix_registers": False,
    }  # fmt: skip
    source = tmp_path / "source"
    source.mkdir()
    (source / "other.cpp").write_text("int other;", encoding="utf-8")
    monkeypatch.setattr("blockdraft.measure.identity.KERNELS", source)
    made.write_bytes(b"\x7fELF GOMP_parallel\0GCC: (Somewhere 99.1) 99.1\0")
    native = NativeBackend(SimpleNamespace(), torch.float32)
    monkeypatch.setattr("blockdraft.kernels.backends.backend_for", lambda *where: native)
    monkeypatch.setattr("blockdraft.kernels.cpu.provenance.build", lambda: made)
    changes = prove_json("--replay", path)["replay"]["changes"]
    named = {f"{change['area']}: {change['name']}": change["now"] for change in changes}
    assert set(named) == {
        "hashes: kernels", "kernels: used", "kernels: compiler", "kernels: flags",
    }  # fmt: skip
    assert named["kernels: used"] is True
    assert named["kernels: compiler"] == "GCC: (Somewhere 99.1) 99.1"
    assert named["kernels: flags"].endswith(" -fopenmp")


def test_an_interrupted_proof_leaves_a_partial_certificate(pair, tmp_path, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Proof, "_run_controls", interrupt)
    path, page = tmp_path / "c.json", tmp_path / "c.html"
    result = prove("--quick", *pair, "--output", path, "--html", page)
    assert result.exit_code == INTERRUPTED
    assert "PARTIAL" in result.stdout
    found = json.loads(path.read_text(encoding="utf-8"))
    assert (found["verdict"], found["partial"]) == ("partial", True)
    assert found["checks"]
    assert found["controls"] == []
    assert "PARTIAL" in page.read_text(encoding="utf-8")


def test_a_failure_outweighs_an_interrupt(pair, monkeypatch):
    real = Proof._check_way

    def check_way(self, way):
        with faults.wrong_rollback(self.llm.engine):
            real(self, way)
        raise KeyboardInterrupt

    monkeypatch.setattr(Proof, "_check_way", check_way)
    result = prove("--quick", *pair, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["verdict"], found["partial"]) == ("failed", True)


def test_bad_lines_of_a_users_file_are_refused_before_anything_is_loaded(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a"}\n{\n{"turns": []}\n', encoding="utf-8")
    line = refusal("--prompts", path, "--target", "no-such-model")
    assert "line 2" in line
    assert "line 3" in line


@pytest.mark.slow
def test_a_users_prompts_are_proven_too(pair, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"id": "own", "prompt": "the the abc"}\n', encoding="utf-8")
    found = prove_json("--quick", *pair, "--prompts", path)
    assert "own/" in "".join(case["id"] for case in found["cases"])
    path.write_text(json.dumps({"prompt": "x" * 600}), encoding="utf-8")
    assert "prompt mine-1: " in refusal("--quick", *pair, "--prompts", path)


def a_certificate(**changed):
    """What a replay reads of a certificate."""
    needed = ("hashes", "versions", "machine", "kernels")
    return {
        "kind": "blockdraft proof",
        "format": 1,
        "threads": 1,
        "config": asdict(LLMConfig()),
        "proof": asdict(ProofConfig()) | {"prompts": []},
        "cases": [{"id": "a/greedy", "output": "1"}, {"id": "b/greedy", "output": "2"}],
        **{name: {} for name in needed},
        **changed,
    }


@pytest.mark.parametrize("name", ["hashes", "versions", "machine", "kernels", "cases", "threads"])
@pytest.mark.parametrize("value", [None, "x", [1], [{"id": "a"}], [{"id": 1, "output": "2"}]])
def test_a_damaged_certificate_is_refused_before_it_is_replayed(tmp_path, name, value):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(a_certificate(**{name: value})), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"has damaged {name}"):
        read_certificate(path)


@pytest.mark.parametrize("value", [None, "x", -1, 2.5, []])
@pytest.mark.parametrize("name", [one.name for one in fields(ProofConfig)] + ["prompts"])
def test_damaged_settings_are_not_replayed(name, value):
    if (name, value) == ("prompts", []):
        return  # no prompts of the user's
    certificate = a_certificate()
    certificate["proof"][name] = value
    with pytest.raises(BlockdraftError):
        settings_of(certificate)


def test_a_replay_that_lacks_cases_does_not_pass():
    before, whole = a_certificate(), a_certificate(partial=False)
    lines = _lines_of_replay(compare(before, whole))
    assert lines == [("outputs", "2 of 2 cases compared, 0 with another output", "ok")]
    fewer = whole | {"cases": whole["cases"][:1]}
    found = compare(before, fewer)
    assert [(change["name"], change["now"]) for change in found["changes"]] == [("b/greedy", None)]
    assert _lines_of_replay(found)[0][2] == "failed"
    assert _lines_of_replay(compare(before, fewer | {"partial": True}))[0][2] == "note"
    assert _lines_of_replay(compare(before | {"cases": []}, whole))[0][2] == "note"


def _lines_of_replay(replay):
    checks = ("checks", "draft_context", "controls", "distribution", "transformers")
    certificate = {"config": {"exact": True}, **{name: [] for name in checks}, "replay": replay}
    return [(line.name, line.found, line.mark) for line in sections(certificate)[0].lines]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot read"),
        ("[" * 100_000, "cannot read"),
        ("[]", "is not a certificate"),
        ('{"kind": "blockdraft proof", "format": 9}', "format 9"),
        ('{"kind": "blockdraft proof", "format": 1}', "lacks config"),
    ],
)
def test_what_is_no_certificate_is_not_replayed(tmp_path, content, reason):
    path = tmp_path / "c.json"
    path.write_text(content, encoding="utf-8")
    assert reason in refusal("--replay", path)


def test_a_proof_on_more_cores_is_replayed_on_as_many(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(a_certificate(threads=9999)), encoding="utf-8")
    line = refusal("--replay", path)
    assert "made with 9999 threads, and this process may use" in line
    assert "replay it where there are 9999" in line


def test_a_replay_takes_no_settings_beside_the_certificate(tmp_path):
    assert "leave out --threads" in refusal("--replay", tmp_path / "c.json", "--threads", 1)


@pytest.mark.parametrize("option", ["--output", "--html"])
def test_where_nothing_can_be_written_nothing_is_begun(tmp_path, option):
    assert "cannot write" in refusal(option, tmp_path / "none" / "c", "--target", "no-such-model")


def test_a_pair_without_a_drafter_is_refused(pair):
    assert "without a drafter" in refusal("--target", pair[1], "--drafter", "none")


class _Checker(HTMLParser):
    """Every element is closed in order, and nothing comes from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        names = {name for name, _ in attrs}
        assert not names & {"src", "href", "onclick", "style"}, (tag, attrs)
        assert tag not in {"script", "link", "iframe", "img"}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.slow
def test_the_page_stands_alone_and_escapes_what_models_say(pair, tmp_path):
    path = tmp_path / "c.json"
    assert prove("--quick", *pair, "--output", path).exit_code == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    found["cases"][0]["text"] = "<td class='x'><script>alert(1)</script> & <b>"
    page = make_page(found)
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    assert "<script>alert(1)</script>" in "".join(checker.texts)
    assert "url(" not in page
    assert "prefers-color-scheme: dark" in page
    assert '<html lang="en">' in page
