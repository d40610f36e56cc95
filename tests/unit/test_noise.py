import itertools

import numpy as np
import pytest
from blockdraft.speculate.noise import CACHE_BYTES, gumbel_noise

from blockdraft.speculate import noise as noise_module


def test_no_two_draws_are_shared() -> None:
    """Also not by keys whose sums are equal: seed + position is no key."""
    seeds = (0, 1, 2, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1)
    keys = itertools.product(seeds, (0, 1, 2, 65535), (0, 1, 2, 511, 4096))
    draws = np.concatenate([gumbel_noise(*key, 64) for key in keys])
    assert len(np.unique(draws)) == draws.shape[0]


def test_a_larger_vocabulary_appends_draws() -> None:
    """Padding of a vocabulary changes no choice."""
    small, large = gumbel_noise(7, 3, 11, 97), gumbel_noise(7, 3, 11, 128)
    assert np.array_equal(small, large[:97])


def test_the_draws_are_these_for_good() -> None:
    """A seed means the same text in every version and on every machine."""
    small = [2.2948880758337693, -1.1234436075356464, 3.42074731844596, -1.7104811000147357]
    large = [0.829742281571786, 2.840439443807184, 3.6802809818225986, 0.21807821794561544]
    assert gumbel_noise(1234, 5, 678, 4).tolist() == pytest.approx(small, rel=1e-12)
    assert gumbel_noise(2**64 - 1, 5, 678, 4).tolist() == pytest.approx(large, rel=1e-12)


def test_the_distribution_is_gumbel() -> None:
    noise = np.concatenate([gumbel_noise(3, 0, position, 50_000) for position in range(4)])
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.03)
    for x in (-1.0, 0.0, 2.0, 6.0):
        assert (noise <= x).mean() == pytest.approx(np.exp(-np.exp(-x)), abs=0.005)
    # float32 uniforms would end at 16.6 and repeat values.
    assert len(np.unique(noise)) == noise.shape[0]


def test_positions_and_samples_are_independent() -> None:
    base = gumbel_noise(9, 0, 100, 20_000)
    for other in (gumbel_noise(9, 0, 101, 20_000), gumbel_noise(9, 1, 100, 20_000)):
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.03
        assert abs(np.corrcoef(base[1:], other[:-1])[0, 1]) < 0.03


def test_the_most_extreme_counters_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    class Extreme:
        def __init__(self, **kwargs: object) -> None: ...

        def random_raw(self, size: int) -> np.ndarray:
            return np.array([0, 2**64 - 1], dtype=np.uint64)

    monkeypatch.setattr(np.random, "Philox", Extreme)
    noise = noise_module._draw(0, 0, 0, 2)
    assert np.isfinite(noise).all()
    assert noise[1] < -3.5
    assert noise[0] > 36.0


def test_the_shared_noise_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        gumbel_noise(1, 0, 0, 4)[0] = 0.0


def test_the_cache_holds_a_crowds_step_and_is_bounded_in_bytes() -> None:
    size_of = {
        vocab_size: noise_module._cached_draw(vocab_size).cache_info().maxsize
        for vocab_size in (97, 49_152, 262_144)
    }
    assert size_of[49_152] >= 16 * 8
    for vocab_size, size in size_of.items():
        assert 1 <= size * vocab_size * 8 <= CACHE_BYTES
    assert gumbel_noise(1, 0, 0, 97) is gumbel_noise(1, 0, 0, 97)
