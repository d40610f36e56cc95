"""Later turns of a conversation are asked as serving asks them."""

from typing import Any

import pytest

from blockdraft.core.errors import ConfigError
from blockdraft.data.answer_file import PriorAnswer
from blockdraft.data.config import DataConfig
from blockdraft.data.prompts import Prompt, prompt_ids, turn_id, with_own_ids
from blockdraft.data.turns import asked_turns, jobs_for
from tests.tiny import tiny_tokenizer

CHANNELS = ("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>")
TURNS = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
)
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


def with_template(ending: str, marks: tuple[str, ...] = ()) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", *CHANNELS, *marks]})
    tokenizer.chat_template = TURNS + ending
    return tokenizer


@pytest.mark.parametrize("marks", [(), ("<think>", "</think>")], ids=["text", "special"])
@pytest.mark.parametrize(
    ("ending", "answer", "said"),
    [
        ("{% endif %}", "hm <b> so.<|end|>", "hm <b> so."),
        ("{% endif %}", "<think>hm</think> so.<|end|>", "<think>hm</think> so."),
        ("{% endif %}{# </think> #}", "<think>\nhm\n</think>\n\nso.<|end|>", "so."),
        ("{% endif %}{# </think> #}", "so </think>.<|end|>", "so </think>."),
        ("<think>\n{% endif %}{# </think> #}", "hm\n</think>\n\nso.<|end|>", "so."),
        (
            "{% endif %}{# <|channel|>analysis<|message|> #}",
            f"{THOUGHT}<|channel|>final<|message|>so.<|return|>",
            "so.",
        ),
    ],
)
def test_an_earlier_answer_comes_without_its_thinking(
    tmp_path: Any, ending: str, answer: str, said: str, marks: tuple[str, ...]
) -> None:
    tokenizer = with_template(ending, marks if "</think>" in ending else ())
    prompt = Prompt(id="p", set="s", text="one", later=("two",))
    config = DataConfig(output=tmp_path, prompts=(tmp_path / "p.jsonl",), temperatures=(0.0,))
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    prior = PriorAnswer(prompt_ids(tokenizer, prompt), tuple(ids), None)
    answered = {("p", 0.0, 0): prior}
    ((key, _, asked),) = asked_turns([prompt], 1, config, tokenizer, answered)
    assert key == ("p+turn2", 0.0, 0)
    opening = tokenizer.decode(prompt_ids(tokenizer, prompt))
    assert opening.startswith("<|start|>user\none<|end|>\n<|start|>assistant\n")
    expected = opening.replace("<think>\n", "") + f"{said}<|end|>\n"
    assert tokenizer.decode(asked) == expected + opening.replace("one", "two")


@pytest.mark.parametrize("is_chat_first", [True, False])
def test_no_prompt_has_the_id_of_a_turn_of_another(is_chat_first: bool) -> None:
    """Its answer would stand for that turn, which would never be asked."""
    chat = Prompt(id="c", set="s", text="one", later=("two",))
    prompts = [chat, Prompt(id="c+turn2", set="s", text="three")]
    named = with_own_ids(prompts if is_chat_first else prompts[::-1])
    ids = [turn_id(prompt, turn) for prompt in named for turn in range(len(prompt.turns))]
    assert len(set(ids)) == 3
    assert named[0].id == ("c" if is_chat_first else "c+turn2")
    assert with_own_ids([chat, chat]) == [chat, chat]


def test_a_prompt_that_the_template_refuses_is_named() -> None:
    """One of a million rows has a system message, and Gemma 2 takes none."""
    tokenizer = with_template("{% endif %}")
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}"
        + tokenizer.chat_template
    )
    prompt = Prompt(id="p7", set="chats", text="one", system="be kind")
    with pytest.raises(
        ConfigError, match=r"messages of system, user of prompt 'p7' of chats: none"
    ):
        prompt_ids(tokenizer, prompt)


def test_prompts_of_just_the_most_tokens_are_asked(tmp_path, caplog):
    config = DataConfig(output=tmp_path, prompts=(tmp_path / "p.jsonl",), max_prompt_tokens=3)
    prompt = Prompt(id="p", set="s", text="hi")
    asked = [((str(size), 0.7, 0), prompt, tuple(range(size))) for size in (2, 3, 4)]
    assert [job.id for job in jobs_for(asked, config, {})] == ["2", "3"]
    assert "prompts left out as too long: 1; raise max_prompt_tokens (it is 3)" in caplog.text
