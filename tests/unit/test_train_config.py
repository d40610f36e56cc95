"""Settings of a training run: what is refused, and how."""

from pathlib import Path

import pytest

from blockdraft.core.errors import ConfigError
from blockdraft.train.config_file import read_train_config

NEEDED = ["target=t", "data=a.jsonl", "out=o"]


def test_values_are_read_as_in_toml():
    config = read_train_config(None, [*NEEDED, "lr=1", 'data=["a", "b"]', "position_weights=decay"])
    assert config.lr == 1
    assert config.data == (Path("a"), Path("b"))
    assert config.position_weights == "decay"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("position_weights=foo", "'foo'; it must be one of dpace, decay, uniform"),
        ("dtype=float64", "one of bfloat16, float32"),
        ("block_size=3.5", "3.5; it must be a whole number"),
        ("block_size=true", "a whole number"),
        ("seed=abc", "'abc'; it must be a whole number"),
        ("seed=-1", "at least 0"),
        ("out=5", "5; it must be a path"),
        ("data=5", "each a path"),
        ("init_from=[]", "a path or unset"),
        ("threads=0", "above 0"),
        ("mask_token_id=-1", "at least 0"),
        ("lr=nan", "a finite number"),
        ("lr=fast", "a finite number"),
        ("device=1", "text"),
        ("max_minutes=soon", "a finite number or unset"),
        ("blocksize=3", "did you mean block_size"),
    ],
)
def test_a_bad_setting_is_refused(setting, reason):
    with pytest.raises(ConfigError) as error:
        read_train_config(None, [*NEEDED, setting])
    assert reason in str(error.value)
