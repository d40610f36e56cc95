import pytest
import torch
from torch import Tensor

from blockdraft.cache import kv
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


def test_a_cache_whose_last_layers_lag_behind_is_cut_too() -> None:
    cache = KVCache(3)
    for index in range(3):
        cache.update(*make_states(9, index), index)
    cache.update(*make_states(5, 7), 0)
    cache.truncate(9)
    assert [layer.length for layer in cache.layers] == [9, 9, 9]


def test_a_failure_while_growing_leaves_buffers_of_one_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = KVLayer()
    layer.update(*make_states(60, 0))
    real, calls = kv._grown, []

    def fail_on_values(buffer: Tensor, capacity: int) -> Tensor:
        calls.append(buffer)
        if len(calls) == 2:
            raise MemoryError
        return real(buffer, capacity)

    monkeypatch.setattr(kv, "_grown", fail_on_values)
    with pytest.raises(MemoryError):
        layer.update(*make_states(10, 1))
    layer.truncate(60)
    keys, values = layer.update(*make_states(10, 1))
    assert keys.shape == values.shape


def test_layers_agree_on_the_mask_after_a_failure_between_them() -> None:
    """The first layer has grown, the others have not; then fewer tokens come."""
    cache = KVCache(3)
    for index in range(3):
        cache.update(*make_states(60, index), index)
    cache.update(*make_states(9, 7), 0)
    cache.truncate(60)
    announced = {layer.get_mask_sizes(1)[0] for layer in cache.layers}
    found = {cache.update(*make_states(1, 8), index)[0].shape[2] for index in range(3)}
    assert announced == found == {2 * KEY_MULTIPLE}


def test_a_cache_repeats_what_it_holds() -> None:
    cache = KVCache(2)
    for index in range(2):
        cache.update(*make_states(3, index), index)
    cache.repeat(8)
    for layer in cache.layers:
        assert layer.length == 8
        assert torch.equal(layer.keys[:, :, 3:6], layer.keys[:, :, :3])
        assert torch.equal(layer.values[:, :, 6:8], layer.values[:, :, :2])
