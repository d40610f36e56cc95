"""One rule of who sees whom in its forms: key by key and as ranges, of numbers and of tensors."""

import itertools

import pytest
import torch

from blockdraft.models.attention.visibility import Visibility

RULES = [
    Visibility(is_causal, window) for is_causal in (True, False) for window in (None, 1, 2, 5, 64)
]


def key_range(rule, query, end):
    found = rule.key_range(query, end)
    assert [list(found)] == rule.key_ranges(torch.tensor([query]), torch.tensor([end])).tolist()
    return found


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_range_holds_exactly_the_keys_that_are_seen(rule):
    for query, end in itertools.product(range(20), range(1, 20)):
        first, last = key_range(rule, query, end)
        seen = [key for key in range(end) if rule.sees(query, key)]
        assert seen == list(range(first, last))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_tensors_are_told_what_numbers_are_told(rule):
    queries, keys = torch.arange(12)[:, None], torch.arange(12)
    told = [[bool(rule.sees(query, key)) for key in range(12)] for query in range(12)]
    assert rule.sees(queries, keys).expand(12, 12).tolist() == told


def test_a_window_counts_the_row_itself():
    assert key_range(Visibility(is_causal=True, window=3), 10, 64) == (8, 11)
    assert key_range(Visibility(is_causal=False, window=3), 10, 64) == (8, 13)
    assert key_range(Visibility(is_causal=False), 10, 64) == (0, 64)
