"""Reading, filtering, splitting and ordering of answers."""

import dataclasses
import logging

import pytest

from blockdraft.core.errors import ConfigError
from blockdraft.data.dataset import (
    collate,
    collate_rows,
    count_answer_tokens,
    epoch_batches,
    read_examples,
    split_held_out,
    unused_special_token,
)
from blockdraft.data.holding_out import base_name, is_held_out
from blockdraft.data.store import Example
from tests.rows import write_rows


def row(number: int, response: list[int], **changes: object) -> dict[str, object]:
    base = {"id": f"p{number}", "set": "s", "prompt_ids": [1, 2, number], "finish": "stop"}
    return base | {"response_ids": response} | changes


def test_reads_both_kinds_of_files_and_leaves_out_what_is_unfit(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    good = list(range(10, 40))
    plain = write_rows(
        tmp_path / "a.jsonl",
        [row(0, good), row(1, good[:7]), row(2, good, finish="loop"), row(3, [5, 6] * 40)],
    )
    zipped = write_rows(tmp_path / "b.jsonl.gz", [row(4, good)])
    examples = read_examples([plain, zipped], min_response_len=8, max_len=20)
    assert [e.id for e in examples] == ["p0", "p4"]
    assert [len(e) for e in examples] == [20, 20]
    # Nothing is dropped or cut without a word.
    assert "left out: looping 2, shorter than 8 tokens 1" in caplog.text
    assert "answers cut off at max_len 20: 2" in caplog.text


def test_answers_to_prompts_as_long_as_all_that_is_read_are_not_called_short(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    long = row(0, list(range(10, 40)), prompt_ids=list(range(100)))
    path = write_rows(tmp_path / "a.jsonl", [long, row(1, list(range(10, 40)))])
    examples = read_examples([path], min_response_len=8, max_len=107)
    assert [e.id for e in examples] == ["p1"]
    assert "left out: without room in max_len 107 behind their prompt 1" in caplog.text
    assert [len(e) for e in read_examples([path], min_response_len=8, max_len=108)] == [108, 33]
    with pytest.raises(ConfigError, match=r"behind their prompt 1\); raise max_len"):
        read_examples([write_rows(tmp_path / "b.jsonl", [long])], min_response_len=8, max_len=107)


def test_a_row_that_is_still_being_written_is_left_out(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [row(0, list(range(30)))])
    with path.open("a", encoding="utf-8") as file:
        file.write('{"id": "half')
    assert len(read_examples([path], min_response_len=8, max_len=99)) == 1


def test_a_last_row_without_a_lines_end_counts(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [row(0, list(range(30))), row(1, list(range(9, 40)))])
    path.write_text(path.read_text(encoding="utf-8").rstrip(), encoding="utf-8")
    assert len(read_examples([path], min_response_len=8, max_len=99)) == 2


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{}\n", "line 1: it needs id"),
        ('{"id": 1, "set": "s", "prompt_ids": [1], "response_ids": [2.5]}\n', "needs id"),
        ("1\n", "not a JSON object"),
        ("nonsense\n", "cannot read"),
        ("", "no answer"),
        ('{"prompt": "hi"}\n', "a prompt without an answer; let the target answer it"),
        (None, "there is no folder or file of answers"),
    ],
)
def test_bad_files_are_named(tmp_path, text, what):
    path = tmp_path / "a.jsonl"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=what) as error:
        read_examples([path], min_response_len=8, max_len=99)
    assert "a.jsonl" in str(error.value)


def test_repeated_answers_of_several_files_are_left_out(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    good = list(range(10, 40))
    files = [
        write_rows(tmp_path / "a.jsonl", [row(0, good), row(1, good[:20])]),
        write_rows(tmp_path / "b.jsonl", [row(0, good, id="p9"), row(1, good[:20]), row(1, good)]),
    ]
    examples = read_examples(files, min_response_len=8, max_len=99)
    assert [(e.id, len(e)) for e in examples] == [("p0", 33), ("p1", 23), ("p1", 33)]
    assert "answers left out: repeated 2" in caplog.text
    assert "cut off" not in caplog.text


def examples_of(ids):
    return [
        Example(id=name, set="s", prompt_ids=(1, 100 + place), response_ids=(2, 3))
        for place, name in enumerate(ids)
    ]


def test_variants_of_a_prompt_are_not_parted():
    names = [f"p{n}{suffix}" for n in range(500) for suffix in ("", "+boxed", "+bare")]
    train, held_out = split_held_out(examples_of(names), 0.1)
    assert len(train) + len(held_out) == 1500
    assert 60 < len(held_out) < 270
    sides = [{e.id.split("+")[0] for e in part} for part in (train, held_out)]
    assert not sides[0] & sides[1]
    # What is told from a name alone, before the answers are there, is the same.
    assert {e.id for e in held_out} == {name for name in names if is_held_out(name, 0.1)}


def test_a_plus_that_begins_no_variant_is_of_the_id():
    """Cut at each plus, all of these ids would be one, and on one side."""
    for names in ([f"+{n}" for n in range(500)], [f"c++{n}" for n in range(500)]):
        _, held_out = split_held_out(examples_of(names), 0.1)
        assert 20 < len(held_out) < 90
    assert base_name("+1+turn2") == "+1"
    assert base_name("a+b1+boxed") == "a"
    assert base_name("+boxed") == "+boxed"


def test_a_prompt_under_several_ids_is_on_one_side():
    first = examples_of([f"p{n}" for n in range(500)])
    # The same prompts under other names, whose later turns have prompts of their own.
    again = [dataclasses.replace(e, id=f"q{n}") for n, e in enumerate(first)]
    later = examples_of([f"q{n}+turn2" for n in range(500)])
    later = [dataclasses.replace(e, prompt_ids=(9, *e.prompt_ids)) for e in later]
    third = [dataclasses.replace(e, id=f"r{n}") for n, e in enumerate(later)]
    train, held_out = split_held_out([*first, *again, *later, *third], 0.1)
    assert len(train) + len(held_out) == 2000
    sides = [{int(e.id.split("+")[0][1:]) for e in part} for part in (train, held_out)]
    assert not sides[0] & sides[1]
    assert 25 < len(sides[1]) < 80
    # Whatever comes behind, the first ones stay where they are.
    for part, kept in zip(split_held_out(first, 0.1), (train, held_out), strict=True):
        assert {e.id for e in part} <= {e.id for e in kept}


def test_answers_without_a_prompt_are_held_out_one_by_one():
    """As if they had one prompt in common, all or none of them were held out."""
    texts = [dataclasses.replace(e, prompt_ids=()) for e in examples_of(map(str, range(500)))]
    train, held_out = split_held_out(texts, 0.1)
    assert len(train) + len(held_out) == 500
    assert 20 < len(held_out) < 90


def test_many_ids_of_a_prompt_hold_no_more_prompts_out():
    """Other programs give every answer an id of its own."""
    examples = [
        dataclasses.replace(example, id=f"{example.id}-{sample}", response_ids=(2, sample))
        for example in examples_of([f"p{n}" for n in range(300)])
        for sample in range(30)
    ]
    assert 0.05 < len(split_held_out(examples, 0.1)[1]) / len(examples) < 0.15


def test_epoch_batches_are_a_permutation_of_like_lengths():
    examples = [
        Example(id=str(n), set="s", prompt_ids=(1,) * (n % 90), response_ids=(2,))
        for n in range(1000)
    ]
    batches = epoch_batches(examples, 8, seed=1, epoch=0)
    assert sorted(i for batch in batches for (i,) in batch) == list(range(1000))
    assert batches == epoch_batches(examples, 8, seed=1, epoch=0)
    assert batches != epoch_batches(examples, 8, seed=1, epoch=1)
    assert batches != epoch_batches(examples, 8, seed=2, epoch=0)
    # The batches of a bucket come in any order: a pass that went from short texts to long ones
    # would end with long ones alone.
    lengths = [len(examples[i]) for batch in batches[:16] for (i,) in batch[:1]]
    assert lengths != sorted(lengths)
    padded = sum(len(b) * max(len(examples[i]) for (i,) in b) for b in batches)
    assert padded < 1.15 * sum(map(len, examples))


def test_collate_pads_on_the_right():
    batch = collate(
        [
            Example(id="a", set="s", prompt_ids=(1, 2), response_ids=(3,)),
            Example(id="b", set="s", prompt_ids=(4,), response_ids=(5, 6, 7)),
        ]
    )
    assert batch.token_ids.tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]]
    assert batch.is_answer.int().tolist() == [[0, 0, 1, 0], [0, 1, 1, 1]]
    assert batch.documents.tolist() == [[0, 0, 0, -1], [0, 0, 0, 0]]


def test_rows_are_filled_with_whole_texts():
    examples = [
        Example(id=str(n), set="s", prompt_ids=(1,) * (n % 37), response_ids=(2, 3))
        for n in range(300)
    ]
    batches = epoch_batches(examples, 8, seed=1, epoch=0, pack_len=64)
    rows = [row for batch in batches for row in batch]
    assert sorted(i for row in rows for i in row) == list(range(300))
    assert all(sum(len(examples[i]) for i in row) <= 64 for row in rows)
    assert sum(map(len, examples)) > 0.7 * 64 * len(rows)
    assert batches == epoch_batches(examples, 8, seed=1, epoch=0, pack_len=64)


def test_texts_that_fill_a_row_to_its_last_token_share_it():
    examples = [
        Example(id=str(n), set="s", prompt_ids=(1,) * 30, response_ids=(2, 3)) for n in range(8)
    ]
    batches = epoch_batches(examples, 2, seed=1, epoch=0, pack_len=64)
    assert [len(row) for batch in batches for row in batch] == [2, 2, 2, 2]


def test_an_answer_of_the_least_length_is_read(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [row(0, list(range(8))), row(1, list(range(7)))])
    examples = read_examples([path], min_response_len=8, max_len=99)
    assert [len(example.response_ids) for example in examples] == [8]


def test_texts_of_a_row_keep_their_own_positions():
    texts = [
        Example(id="a", set="s", prompt_ids=(1, 2), response_ids=(3,)),
        Example(id="b", set="s", prompt_ids=(4,), response_ids=(5, 6)),
    ]
    batch = collate_rows([texts], width=8)
    assert batch.token_ids.tolist() == [[1, 2, 3, 4, 5, 6, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1, 1, -1, -1]]
    assert batch.is_answer.int().tolist() == [[0, 0, 1, 0, 1, 1, 0, 0]]


def test_tokens_are_counted_in_answers_only():
    assert count_answer_tokens(examples_of("ab")) == {2: 2, 3: 2}


def test_mask_token_is_the_first_special_one_that_no_text_holds():
    assert unused_special_token([3, 1, 9, 5], {1, 2, 3}, 10) == 9
    # The tokenizer of a target of text alone may have tokens of images, behind its last row.
    assert unused_special_token([3, 10, 5], {1, 2, 3}, 10) == 5
    with pytest.raises(ConfigError, match=r"set mask_token_id to .*, such as 8"):
        unused_special_token([1, 2], {1, 2, 3, 9}, 10)
    with pytest.raises(ConfigError, match="all 4 tokens of the vocabulary occur"):
        unused_special_token([1, 2], {0, 1, 2, 3}, 4)
