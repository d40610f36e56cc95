"""`blockdraft doctor` as a command: exit codes, table, JSON, refusals."""

import json

import pytest
import torch

from blockdraft.core.errors import NO
from blockdraft.diagnose.doctor import machine_checks
from blockdraft.diagnose.doctor.check import Check, verdict
from tests.clear_pair import edit_facts, write_pair
from tests.command_line import refusal, run, run_json


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


def test_a_pair_in_order_exits_with_0(pair):
    result = run("doctor", *pair)
    assert result.exit_code == 0, result.output
    for part in ("NO PROBLEMS", "target weights", "tau, writing", "expected 5.73", "✓ ok"):
        assert part in result.stdout
    assert "\x1b" not in result.stdout  # no terminal, no colors
    assert "decoding 20 prompts" in result.stderr


@pytest.mark.slow
def test_json_has_every_line_and_the_counts(pair):
    found = run_json("doctor", *pair)
    assert found["in_order"] is True
    assert {"name", "mark", "found", "remedy"} == set(found["checks"][0])
    assert {check["mark"] for check in found["checks"]} <= {"ok", "warning"}
    assert set(found["acceptance"]) == {"math", "code", "chat", "writing"}
    assert found["acceptance"]["math"]["acceptance_length"] == pytest.approx(63 / 11)
    assert {"versions", "machine", "command", "config", "seconds"} <= set(found)
    assert run_json("doctor", *pair, "--quick")["acceptance"] == {}


def test_a_line_that_is_out_exits_with_1_and_says_what_to_do(tmp_path):
    target, drafter = write_pair(tmp_path)
    edit_facts(drafter, "target", template_sha256="0" * 64)
    arguments = ["doctor", "--target", target, "--drafter", drafter, "--dtype", "float32"]
    result = run(*arguments, "--quick")
    assert result.exit_code == NO
    assert "PROBLEMS FOUND: chat template" in result.stdout
    assert "→ copy chat_template.jinja" in " ".join(result.stdout.split())
    result = run(*arguments, "--quick", "--json")
    assert result.exit_code == NO
    assert json.loads(result.stdout)["in_order"] is False


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--drafter", "none"], "no drafter to examine"),
        (["--drafter", "no-such"], "no model 'no-such'"),
        (["--thinking", "on"], "no such switch"),
        (["--thinking", "perhaps"], "--thinking"),
        (["--dtype", "int3"], "int3"),
        (["--threads", "0"], "--threads is 0; give"),
        (["--threads", "999"], "--threads is 999, and"),
    ],
)
def test_what_cannot_be_examined_is_refused(pair, options, reason):
    assert reason in refusal("doctor", *pair, "--quick", *options)


def test_a_damaged_provenance_is_refused(tmp_path):
    target, drafter = write_pair(tmp_path)
    (drafter / "provenance.json").write_text("[1]", encoding="utf-8")
    arguments = ["--target", target, "--drafter", drafter, "--quick"]
    assert "provenance.json" in refusal("doctor", *arguments)
    (drafter / "provenance.json").write_text("{", encoding="utf-8")
    assert "provenance.json" in refusal("doctor", *arguments)


def test_the_verdict_counts():
    ok, doubt = Check("a", "ok", ""), Check("b", "warning", "")
    assert verdict([ok]) == "NO PROBLEMS: nothing was found that costs acceptance"
    assert verdict([ok, doubt, doubt]).endswith("(2 warnings)")
    out, unknown = Check("c", "out", ""), Check("d", "unknown", "")
    assert verdict([out, unknown, doubt]) == "PROBLEMS FOUND: c (1 warning, 1 unknown)"
    assert verdict([Check("tau, math", "out", ""), out]) == "PROBLEMS FOUND: tau, math; c"


def test_a_card_without_room_for_the_check_of_its_kernels_is_told(pair, monkeypatch):
    def run_out(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")

    monkeypatch.setattr(machine_checks, "kernels_check", run_out)
    said = refusal("doctor", *pair, "--quick")
    assert said.endswith("free some on the device, or take another --device")
