"""Texts in arrays are those of a list of examples, from files and from memory, in every use."""

import random
from collections import Counter
from multiprocessing import get_context

import pytest

from blockdraft.core.files import DiskError
from blockdraft.data import dataset
from blockdraft.data.dataset import epoch_batches, read_examples, split_held_out
from blockdraft.data.holding_out import draw_of
from blockdraft.data.identity import texts_sha256
from blockdraft.data.store import CHUNK, Example, TextStore
from tests.rows import write_rows
from tests.train_runs import write_answers


def some_examples(num=300):
    draw = random.Random(0)
    return [
        Example(
            id=f"päge-{draw.randrange(num // 2)}" + draw.choice(["", "+turn2"]),
            set=f"set{draw.randrange(3)}",
            prompt_ids=tuple(draw.randrange(100) for _ in range(draw.randrange(4))),
            response_ids=tuple(draw.randrange(100_000) for _ in range(draw.randrange(12))),
        )
        for _ in range(num)
    ]


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Files of any size are read into the cache."""
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dataset, "SMALL_BYTES", 0)
    return tmp_path / "cache" / "texts"


def read(*paths, max_len=99):
    return read_examples(paths, min_response_len=1, max_len=max_len)


def test_a_store_holds_the_examples():
    examples = some_examples()
    store = TextStore.of(examples)
    assert list(store) == examples
    assert list(store[7:40:3]) == examples[7:40:3]
    assert store[-1] == examples[-1]
    assert store.lengths.tolist() == [len(example) for example in examples]
    assert TextStore.of(store) is store
    with pytest.raises(IndexError):
        store[len(examples)]


@pytest.mark.parametrize("chunk", [7, CHUNK])
def test_sums_over_a_choice_of_texts_are_those_of_its_examples(monkeypatch, chunk):
    monkeypatch.setattr("blockdraft.data.store.CHUNK", chunk)
    store = TextStore.of(some_examples())
    for part in (store, store[::2], store[::-1], store[5:6], store[:0]):
        examples = list(part)
        counts = Counter(token for example in examples for token in example.response_ids)
        # The order decides between tokens of one count.
        assert list(part.count_answer_tokens().items()) == list(counts.items())
        assert part.used_tokens() == {token for example in examples for token in example.token_ids}
        assert texts_sha256(part) == texts_sha256(examples)
        for limit in (50, 99_000, 10**6):
            above = [e for e in examples if max(e.token_ids, default=0) > limit]
            assert part.first_above(limit) == next(iter(above), None)


def test_hashes_tell_texts_apart():
    one = Example(id="a", set="s", prompt_ids=(1, 2), response_ids=(3,))
    moved = Example(id="a", set="s", prompt_ids=(1,), response_ids=(2, 3))
    assert texts_sha256([one]) != texts_sha256([moved])
    assert texts_sha256([one, moved]) != texts_sha256([moved, one])


def split_one_by_one(examples, share):
    """The rule in plain words: a group goes where the first of its names goes."""
    names = [example.id.split("+")[0] for example in examples]
    groups = list(range(len(examples)))
    is_changed = True
    while is_changed:
        is_changed = False
        for i, one in enumerate(examples):
            for j, other in enumerate(examples[:i]):
                same = names[i] == names[j] or one.prompt_ids == other.prompt_ids
                if same and groups[i] != groups[j]:
                    groups[i] = groups[j] = min(groups[i], groups[j])
                    is_changed = True
    held_out = [draw_of(names[group]) < share * 2**64 for group in groups]
    return [
        [example for example, out in zip(examples, held_out, strict=True) if out == side]
        for side in (False, True)
    ]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_split_is_the_one_of_the_rule(share):
    draw = random.Random(1)
    examples = [
        Example(
            id=f"{draw.randrange(60)}{draw.choice(['', '+boxed'])}",
            set="s",
            prompt_ids=(draw.randrange(80),),
            response_ids=(1,),
        )
        for _ in range(80)
    ]
    assert list(map(list, split_held_out(examples, share))) == split_one_by_one(examples, share)


def test_texts_from_the_cache_are_those_from_the_files(tmp_path, monkeypatch, cached):
    path = write_answers(tmp_path / "answers.jsonl", 50)
    mapped = read(path)
    assert len(list(cached.glob("*/tokens.bin"))) == 1
    with monkeypatch.context() as patch:
        patch.setattr(dataset, "SMALL_BYTES", 2**30)
        in_memory = read(path)
    assert list(mapped) == list(in_memory)
    assert texts_sha256(mapped) == texts_sha256(in_memory)
    for one, other in zip(split_held_out(mapped, 0.3), split_held_out(in_memory, 0.3), strict=True):
        assert list(one) == list(other)
        for pack_len in (None, 60):
            assert epoch_batches(one, 4, 1, 2, pack_len) == epoch_batches(
                list(other), 4, 1, 2, pack_len
            )


def test_the_cache_is_read_again_and_never_for_other_answers(tmp_path, monkeypatch, cached):
    path = write_answers(tmp_path / "answers.jsonl", 9)
    first = list(read(path))
    reads = []
    rows_of = dataset.read_rows
    monkeypatch.setattr(dataset, "read_rows", lambda path: reads.append(path) or rows_of(path))
    assert list(read(path)) == first
    # The content counts, not the name.
    assert list(read(path.rename(tmp_path / "moved.jsonl"))) == first
    assert not reads
    assert [len(e) for e in read(tmp_path / "moved.jsonl", max_len=20)] == [20] * 9
    write_answers(tmp_path / "moved.jsonl", 9, seed=1)
    assert list(read(tmp_path / "moved.jsonl")) != first
    assert len(reads) == 2


def test_a_reading_that_fails_leaves_nothing_behind(tmp_path, cached):
    path = write_rows(tmp_path / "bad.jsonl", [{"id": "a"}])
    with pytest.raises(dataset.ConfigError, match="needs id"):
        read(path)
    assert not [entry for entry in cached.iterdir() if entry.suffix != ".lock"]


def test_a_full_disk_is_said(tmp_path, monkeypatch, cached):
    def full(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dataset, "Writer", full)
    with pytest.raises(DiskError, match="make space"):
        read(write_answers(tmp_path / "answers.jsonl", 3))


def _number_read(path):
    return len(read(path))


def test_processes_that_start_together_read_once(tmp_path, cached, caplog):
    path = write_answers(tmp_path / "answers.jsonl", 200)
    with get_context("fork").Pool(3) as pool:
        assert pool.map(_number_read, [path] * 3) == [200] * 3
    assert len(list(cached.glob("*/tokens.bin"))) == 1
    assert not list(cached.glob("tmp*"))
