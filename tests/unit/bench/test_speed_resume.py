"""`bench speed`: runs that go on after they were ended, the same run twice, conversations."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from blockdraft.bench.config import SpeedConfig
from blockdraft.bench.journal import Journal
from blockdraft.bench.outside.interface import Failure, OutsideOutput
from blockdraft.bench.speed import bench as bench_module
from blockdraft.bench.speed.bench import SpeedBench, SpeedJournal
from blockdraft.bench.timed_output import TimedOutput
from blockdraft.bench.workload import BenchPrompt, chosen
from blockdraft.core.errors import INTERRUPTED, AnswerFailed, ConfigError, DiskError, RequestError
from blockdraft.llm import LLM
from tests.command_line import refusal, run
from tests.interrupts import interrupt_call
from tests.rows import write_rows
from tests.tiny import CONTEXT

ROWS = [
    {"id": "a", "category": "talk", "turns": ["the abc", "and then?", "why"]},
    {"id": "b", "category": "lone", "prompt": "ab the ab"},
    {"id": "c", "category": "lone", "prompt": "!!! xyz"},
]
TURNS = [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("c", 1)]


@pytest.fixture(scope="module")
def llm(folders):
    return LLM(*folders, dtype="float32", adaptive=False)


@pytest.fixture
def arguments(pair, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    write_rows(prompts, ROWS)
    options = ["bench", "speed", "--prompts", prompts, *pair]
    options += ["--max-tokens", 8, "--no-transformers", "--whole-blocks"]
    options += ["--threads", 1]
    return [*options, "--output", tmp_path / "speed.json"]


def written(arguments):
    return json.loads(arguments[-1].read_text(encoding="utf-8"))


def journal_of(arguments):
    return arguments[-1].with_name("speed.json.part.jsonl")


def taus(result):
    (one,) = result["runs"]
    return [
        (row["id"], row["turn"], row["drafted"]["token_ids"], row["drafted"]["acceptance_length"])
        for row in one["prompts"]
    ]


def interrupt_at(monkeypatch, number):
    """Ctrl-C in the midst of the n-th turn of a prompt."""
    return interrupt_call(monkeypatch, bench_module, "_named", number)


@pytest.mark.slow
def test_the_same_command_twice_gives_the_same_tau(arguments):
    found = []
    arguments[arguments.index("--max-tokens") + 1] = 60  # long enough for lookup to be right
    for _ in range(2):
        assert run(*arguments).exit_code == 0
        found.append(written(arguments))
    assert taus(found[0]) == taus(found[1])
    figures = [result["runs"][0]["figures"]["all"]["acceptance_length"] for result in found]
    assert figures[0] == figures[1] > 1
    assert [row[:2] for row in taus(found[0])] == TURNS
    assert found[0]["num_resumed"] == 0
    assert not found[0]["config"]["adaptive"]
    assert not journal_of(arguments).exists()


def test_an_interrupted_command_goes_on_and_measures_nothing_twice(arguments, monkeypatch):
    assert run(*arguments).exit_code == 0
    whole = written(arguments)
    arguments[-1].unlink()
    with monkeypatch.context() as patch:
        interrupt_at(patch, 4)
        broken_off = run(*arguments)
    assert broken_off.exit_code == INTERRUPTED
    said = broken_off.stderr.splitlines()[-1]
    assert said == (
        f"blockdraft: interrupted; {journal_of(arguments)} holds what was measured; the same "
        "command resumes it"
    )
    assert not arguments[-1].exists()
    calls = interrupt_at(monkeypatch, 99)
    assert run(*arguments).exit_code == 0
    assert [prompt.id for prompt, *_ in calls] == ["b", "c"]
    assert taus(written(arguments)) == taus(whole)
    assert written(arguments)["num_resumed"] == 3
    assert not journal_of(arguments).exists()


def test_half_a_row_is_measured_again(arguments, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        run(*arguments)
    path = journal_of(arguments)
    path.write_text(path.read_text(encoding="utf-8")[:-40], encoding="utf-8")
    assert run(*arguments).exit_code == 0
    assert written(arguments)["num_resumed"] == 1
    assert [row[:2] for row in taus(written(arguments))] == TURNS


def test_a_disk_that_fills_up_is_named_with_what_to_do(tmp_path):
    path = tmp_path / "speed.json.part.jsonl"
    journal = Journal(path)
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.raises(DiskError, match=r"speed\.json\.part\.jsonl: its disk is full; make space"):
        journal.add((0,), 1)
    path.unlink()
    path.mkdir()
    with pytest.raises(DiskError, match=r"speed\.json\.part\.jsonl: Is a directory; fix its disk"):
        journal.add((0,), 1)


def test_other_weights_and_threads_do_not_go_on(arguments, monkeypatch, folders):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        run(*arguments)
    with monkeypatch.context() as patch:
        patch.setattr("torch.get_num_threads", lambda: 2)
        said = refusal(*arguments)
    assert (
        "is from a run with --threads 1, and this one uses 2; give --threads 1, delete it" in said
    )
    weights = folders[1] / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    try:
        said = refusal(*arguments)
    finally:
        weights.write_bytes(before)
    assert "from a run with different weights and cannot be resumed" in said


def test_another_command_does_not_go_on(arguments, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        run(*arguments)
    said = refusal(*arguments[:-2], "--temperature", "0.5", *arguments[-2:])
    assert "from a run with different temperature and cannot be resumed" in said
    said = refusal(*arguments[:-2], "--no-lookup", "--max-tokens", "9", *arguments[-2:])
    assert "from a run with different lookup, --max-tokens and cannot be resumed" in said
    journal_of(arguments).write_text("{}\n", encoding="utf-8")
    assert "not a journal of bench speed" in refusal(*arguments)


@pytest.mark.slow
def test_a_killed_command_goes_on(arguments):
    """kill -9 between two prompts, in a process of its own."""
    command = [sys.executable, "-m", "blockdraft.cli.main", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    path = journal_of(arguments)
    for _ in range(24_000):  # two minutes: others may use all cores
        if path.exists() and path.read_bytes().count(b"\n") >= 3:
            break
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not arguments[-1].exists()
    assert run(*arguments).exit_code == 0
    resumed = written(arguments)
    assert resumed["num_resumed"] >= 2
    assert run(*arguments).exit_code == 0
    assert taus(resumed) == taus(written(arguments))


def test_failures_of_other_engines_are_kept(tmp_path):
    timed = TimedOutput((1, 2), 2.0, 1.0, largest_gap=0.5)
    samples = {"plain": timed, "outside x": OutsideOutput(timed, 3), "outside y": Failure("died")}
    path = tmp_path / "j.jsonl"
    SpeedJournal(path).add((1, 7, 2), samples)
    journal = SpeedJournal(path)
    assert journal.done == {(1, 7, 2): samples}
    assert journal.num_found == 1
    path.write_text('{"settings": {}}\n{"run": 1}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="damaged"):
        SpeedJournal(path)


def test_a_later_turn_stands_behind_the_answer(llm, monkeypatch):
    prompts, asked = [BenchPrompt("a", "talk", "the abc", ("and then?",))], []
    real = llm.generate
    monkeypatch.setattr(llm, "generate", lambda ids, params: asked.append(ids) or real(ids, params))
    bench = SpeedBench(llm, with_transformers=False)
    first, second = bench.run(prompts, SpeedConfig(max_tokens=6))
    assert (first.turn, second.turn) == (1, 2)
    assert second.identical
    answer = llm.tokenizer.decode(first.plain.token_ids)
    talk = ["the abc", answer, "and then?"]
    if llm.tokenizer.has_chat_template:
        roles = ("user", "assistant", "user")
        messages = [{"role": r, "content": t} for r, t in zip(roles, talk, strict=True)]
        expected = llm.tokenizer.encode_chat(messages)
    else:
        expected = llm.tokenizer.encode("\n\n".join(talk))
    assert asked[-1] == asked[-2] == expected


def test_a_later_turn_does_not_see_the_thinking_of_the_answer(folders, monkeypatch):
    llm, asked = LLM(*folders, dtype="float32", adaptive=False), []
    template = llm.tokenizer.chat_template + "<think>{# </think> #}"
    monkeypatch.setattr(llm.tokenizer._tokenizer, "chat_template", template)
    real = llm.generate
    monkeypatch.setattr(llm, "generate", lambda ids, params: asked.append(ids) or real(ids, params))
    prompts = [BenchPrompt("a", "talk", "the abc", ("and then?",))]
    SpeedBench(llm, with_transformers=False).run(prompts, SpeedConfig(max_tokens=6))
    roles = ("user", "assistant", "user")
    talk = ["the abc", "", "and then?"]  # six tokens were not enough to end the thinking
    messages = [{"role": r, "content": t} for r, t in zip(roles, talk, strict=True)]
    assert asked[-1] == llm.tokenizer.encode_chat(messages)


def test_a_conversation_that_cannot_fit_is_refused_before_weights_are_read(arguments, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps(ROWS[0]) + "\n", encoding="utf-8")
    arguments[arguments.index("--max-tokens") + 1] = CONTEXT // 2
    assert "prompt a of talk, turn 3" in refusal(*arguments)


def test_a_turn_that_does_not_fit_is_named(llm):
    prompts = [BenchPrompt("a", "talk", "the abc", ("x" * CONTEXT,))]
    bench = SpeedBench(llm, with_transformers=False)
    with pytest.raises(RequestError, match="prompt a of talk, turn 2"):
        bench.run(prompts, SpeedConfig(max_tokens=6))


@pytest.mark.parametrize("turns", [["a", " "], ["a", 3], ["a", None]])
def test_a_bad_later_turn_is_refused(arguments, tmp_path, turns):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"turns": turns}), encoding="utf-8")
    assert "line 1: a turn after the first" in refusal(*arguments)


def test_the_seed_chooses_the_prompts():
    prompts = [BenchPrompt(str(number), "c", "x") for number in range(50)]
    one, same, other = (chosen(prompts, 5, seed) for seed in (0, 0, 1))
    assert one == same != other
    assert len(one) == 5
    assert sorted(one, key=lambda prompt: int(prompt.id)) == one
    assert chosen(prompts, 50, 3) == chosen(prompts, None, 3) == prompts


def test_a_choice_by_seed_stands_in_the_result(arguments):
    listed = []
    for seed in (3, 3):
        assert run(*arguments[:-2], "--limit", 1, "--seed", seed, *arguments[-2:]).exit_code == 0
        listed.append([row[0] for row in taus(written(arguments))])
    expected = chosen([BenchPrompt(row["id"], "", "") for row in ROWS], 1, seed=3)
    assert {name for names in listed for name in names} == {expected[0].id}


def test_an_answer_that_fails_ends_the_run_and_names_its_prompt(llm, monkeypatch, tmp_path):
    """It is neither measured as if it were whole nor left out, and what was measured is kept."""
    real, path = llm.generate, tmp_path / "j.jsonl"

    def failing(ids, params):
        found = real(ids, params)
        if ids != bad or not failing.fails:
            return found
        broken = replace(found.completions[0], finish_reason="error", error="it broke")
        return replace(found, completions=(broken,))

    prompts = [BenchPrompt("a", "c", "the abc"), BenchPrompt("b", "c", "!!! xyz")]
    bad = llm.tokenizer.encode_chat([{"role": "user", "content": prompts[1].text}])
    failing.fails = True
    monkeypatch.setattr(llm, "generate", failing)
    bench, config = SpeedBench(llm, with_transformers=False), SpeedConfig(max_tokens=6)
    with pytest.raises(AnswerFailed, match=r"prompt b, turn 1: .*it broke"):
        bench.run(prompts, config, journal=SpeedJournal(path))
    failing.fails = False
    journal = SpeedJournal(path)
    assert journal.num_found == 1
    assert len(bench.run(prompts, config, journal=journal)) == 2
