import pytest
import torch
from torch import Tensor

from blockdraft.cache.kv import KEY_MULTIPLE, KVCache, KVLayer


def make_states(num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, 2, num_tokens, 4, generator=generator)
    return keys, -keys


def test_a_key_lies_at_its_position_whatever_was_rolled_back() -> None:
    layer = KVLayer()
    truth = torch.empty(1, 2, 0, 4)
    for seed, (num_new, num_kept) in enumerate([(5, 5), (60, 1), (8, 8), (70, 3), (1, 1)]):
        keys, values = make_states(num_new, seed)
        found = layer.update(keys, values)
        assert torch.equal(found[0][:, :, truth.shape[2] : layer.length], keys)
        assert found[0].shape[2] % KEY_MULTIPLE == 0
        truth = torch.cat([truth, keys[:, :, :num_kept]], dim=2)
        layer.truncate(truth.shape[2])
        assert layer.get_seq_length() == truth.shape[2]
        assert torch.equal(layer.keys[:, :, : layer.length], truth)
        assert torch.equal(layer.values[:, :, : layer.length], -truth)


@pytest.mark.parametrize("start", [0, 1, 63, 64, 65, 130])
@pytest.mark.parametrize("num_new", [1, 2, 16, 64])
def test_the_announced_mask_fits_the_keys_handed_out(start: int, num_new: int) -> None:
    layer = KVLayer()
    if start:
        layer.update(*make_states(start, 0))
    announced, offset = layer.get_mask_sizes(num_new)
    keys, values = layer.update(*make_states(num_new, 1))
    assert offset == 0
    assert keys.shape[2] == values.shape[2] == announced
    assert keys.is_contiguous()
    assert values.is_contiguous()


def test_the_announced_mask_fits_after_a_rollback_too() -> None:
    layer = KVLayer()
    layer.update(*make_states(70, 0))
    layer.truncate(10)
    announced, _ = layer.get_mask_sizes(2)
    assert layer.update(*make_states(2, 1))[0].shape[2] == announced


def test_a_cache_truncates_all_layers_and_never_grows_by_it() -> None:
    cache = KVCache(3)
    for index in range(3):
        cache.update(*make_states(9, index), index)
    cache.truncate(4)
    assert cache.length == 4
    assert [layer.length for layer in cache.layers] == [4, 4, 4]
    with pytest.raises(AssertionError):
        cache.truncate(5)
