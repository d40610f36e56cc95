"""Sets of prompts by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from blockdraft.bench.decode import encode_prompt
from blockdraft.bench.sets import SETS, read_prompts
from blockdraft.bench.workload import BenchPrompt, read_workload
from blockdraft.core.errors import ConfigError, RequestError
from blockdraft.core.request import SamplingParams
from blockdraft.data.boxed import BOXED_LINE
from blockdraft.text.tokenizer import load_tokenizer
from blockdraft.text.tool_prompt import encode_tool_chat
from blockdraft.text.tools import parse_tools
from tests.command_line import refusal, run, run_json
from tests.rows import write_rows
from tests.tiny import tiny_drafter_folder, tiny_target_folder


def test_a_set_is_read_from_the_users_folder(tmp_path):
    math, tool = {"id": "1", "category": "math"}, {"id": "2", "category": "tool-simple"}
    write_rows(tmp_path / "gsm8k_test.jsonl.gz", [math | {"turns": ["two?"]}])
    write_rows(tmp_path / "bfcl_v4.jsonl", [tool | {"turns": ["area?"]}])
    own = write_rows(tmp_path / "own.jsonl", [{"prompt": "left out"}, {"prompt": "mine"}])
    assert read_prompts([Path("gsm8k"), Path("bfcl"), own], tmp_path, 1) == [
        BenchPrompt("1", "gsm8k", "two?" + BOXED_LINE),
        BenchPrompt("2", "tool-simple", "area?"),
        BenchPrompt("own-2", "own", "mine"),
    ]


BFCL_TOOL = {
    "name": "math.area",
    "description": "Of a triangle.",
    "parameters": {
        "type": "dict",
        "properties": {
            "base": {"type": "float", "description": "Its base."},
            "corners": {"type": "tuple", "items": {"type": "any"}},
            "type": {"type": "string"},
        },
        "required": ["base"],
    },
}


def test_tools_are_read_in_openais_form_and_in_that_of_bfcl(tmp_path):
    declared = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    rows = [
        {"prompt": "area?", "system": "Be brief.", "tools": [BFCL_TOOL, "only.a.name"]},
        {"prompt": "f?", "tools": [declared]},
        {"prompt": "named", "tools": ["only.a.name"]},
    ]
    area, own, named = read_workload(write_rows(tmp_path / "tools.jsonl", rows))
    assert area.system == "Be brief."
    (tool,) = parse_tools(area.tools)
    assert tool.name == "math_area"
    assert tool.parameters["properties"] == {
        "base": {"type": "number", "description": "Its base."},
        "corners": {"type": "array", "items": {}},
        "type": {"type": "string"},
    }
    assert tool.declaration["function"]["parameters"] == tool.parameters
    assert own.tools == (declared,)
    assert named.tools == ()


def test_a_prompt_is_asked_with_its_system_text_and_tools(tmp_path):
    rows = [{"prompt": "area?", "system": "S.", "tools": [BFCL_TOOL]}]
    (prompt,) = read_workload(write_rows(tmp_path / "p.jsonl", rows))
    tokenizer = load_tokenizer(tiny_target_folder(tmp_path))

    def asked(one):
        ids = encode_prompt(tokenizer, lambda ids, params: None, one, SamplingParams())
        return tokenizer.decode_all(ids)

    assert asked(prompt) == tokenizer.decode_all(
        encode_tool_chat(
            tokenizer,
            [{"role": "system", "content": "S."}, {"role": "user", "content": "area?"}],
            parse_tools(prompt.tools),
        )
    )
    assert '"math_area"' in asked(prompt)
    bare = asked(replace(prompt, tools=(), system=None))
    assert bare == "<|start|>user\narea?<|end|>\n<|start|>assistant\n"
    with pytest.raises(RequestError, match=r"p-1 of p: .* function 'math_area' twice"):
        asked(replace(prompt, tools=prompt.tools * 2))
    with pytest.raises(RequestError, match="no such switch; leave out --thinking"):
        asked(replace(prompt, thinking="off"))


def test_thinking_is_switched_on_and_off_and_listed(tmp_path):
    folder, drafter = tiny_target_folder(tmp_path), tiny_drafter_folder(tmp_path)
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "the abc"}])
    output = tmp_path / "speed.json"
    options = ["bench", "speed", "--prompts", path, "--target", folder, "--drafter", drafter]
    options += ["--dtype", "float32", "--max-tokens", 4, "--no-transformers", "--output", output]
    assert "no such switch" in refusal(*options, "--thinking", "on")
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    template = config.pop("chat_template", None) or (folder / "chat_template.jinja").read_text()
    config["chat_template"] = template + "{{ '<think>' if enable_thinking else 'straight' }}"
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config_path.write_text(json.dumps(config), encoding="utf-8")
    (prompt,) = read_prompts([path], None, None, thinking="on")
    tokenizer = load_tokenizer(folder)
    endings = {}
    for thinking in ("on", "off"):
        one = replace(prompt, thinking=thinking)
        ids = encode_prompt(tokenizer, lambda ids, params: None, one, SamplingParams())
        endings[thinking] = tokenizer.decode_all(ids).rpartition("\n")[2]
    assert endings == {"on": "<think>", "off": "straight"}
    result = run(*options, "--thinking", "on")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(output.read_text(encoding="utf-8"))["runs"][0]["prompts"]
    assert row["thinking"] == "on"


def test_a_file_goes_before_a_set_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "gsm8k", [{"prompt": "mine"}])
    assert [prompt.text for prompt in read_prompts([Path("gsm8k")], None, None)] == ["mine"]


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gsm9k is neither a file nor a set; sets are gsm8k, "):
        read_prompts([Path("gsm9k")], tmp_path, None)
    with pytest.raises(ConfigError, match=r"gsm8k_test\.jsonl\.gz with --sets"):
        read_prompts([Path("gsm8k")], None, None)
    with pytest.raises(ConfigError, match=r"holds neither mbpp_sanitized_test\.jsonl nor"):
        read_prompts([Path("mbpp")], tmp_path, None)
    write_rows(tmp_path / "aime25.jsonl", [])
    with pytest.raises(ConfigError, match=r"aime25\.jsonl holds no prompts"):
        read_prompts([Path("aime25")], tmp_path, None)


def test_an_unknown_set_is_refused_before_anything_is_loaded(tmp_path):
    arguments = ["bench", "speed", "--prompts", "gsm9k", "--sets", tmp_path, "--target", "x"]
    assert "neither a file nor a set" in refusal(*arguments)


def test_sets_are_listed_with_license_and_source():
    listed = run_json("bench", "sets")
    assert [one["name"] for one in listed] == list(SETS)
    assert all(one["license"] and one["source"] for one in listed)
    assert {one["name"] for one in listed if one["use"] == "paper"} == {
        *("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench")
    }
    said = run("bench", "sets").stdout
    assert "openai/human-eval" in said
    assert "paper: one of the seven sets of the DFlash paper" in said.splitlines()[0]
