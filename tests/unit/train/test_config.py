"""Settings of a training run: what is refused, and how."""

from pathlib import Path

import pytest

from blockdraft.core.errors import ConfigError
from blockdraft.train.config_file import read_run, resolve_run

NEEDED = ["target=t", "data=a.jsonl", "out=o"]


def test_values_are_read_as_in_toml():
    config = read_run(None, [*NEEDED, "lr=1", 'data=["a", "b"]', "position_weights=decay"]).train
    assert config.lr == 1
    assert config.data == (Path("a"), Path("b"))
    assert config.position_weights == "decay"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("position_weights=foo", "'foo'; it must be one of dpace, decay, uniform"),
        ("dtype=float64", "one of auto, bfloat16, float32"),
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
        ("lr=1e39", "a finite number below 3.4e38"),
        (f"lr=1{'0' * 400}", "a finite number below 3.4e38"),
        (f"lr=1{'0' * 5000}", "a finite number below 3.4e38"),
        (f"lr={'[' * 100_000}", "a finite number below 3.4e38"),
        (f"max_len={2**63}", "a whole number below 2^63"),
        ("blocksize=", "did you mean block_size?"),
        ("answers.sample=", "did you mean answers.samples"),
        ("lr=fast", "a finite number"),
        ("device=1", "text"),
        ("max_minutes=soon", "a finite number below 3.4e38 or unset"),
        ("blocksize=3", "did you mean block_size? `blockdraft train --keys` lists all"),
        ("foo=1", "'foo' is unknown; `blockdraft train --keys` lists all"),
        ("answers.sample=3", "did you mean answers.samples"),
        ("answers.target=x", "'answers.target' is unknown"),
        ("answer.samples=3", "the only table is answers"),
        ("tensorboard=1", "true or false"),
        ("pack_len=100", "at least max_len, 1024"),
        ("feature_cache=./o", "a folder of its own, not out"),
        ("optimizer=sgd", "one of muon, adamw"),
        ("lr", "has no value"),
        ("shard_target=true", "tau_limit is 4, and real decoding needs the whole target"),
        ("device_map=auto", "set tau_limit=0"),
        ("feature_cache=null", "'null'; give \"none\" to leave it unset, or nothing (feature_c"),
        ("max_minutes=None", "max_minutes is 'None'; give \"none\" to leave it unset"),
        ("answers.endpoint=NULL", "answers.endpoint is 'NULL'; give \"none\" to leave it unset"),
        ("device_map=cuda:7", "one of auto, balanced, balanced_low_0, sequential or unset"),
        ("out=a.jsonl", "out is 'a.jsonl'; it must be a folder of its own, not data's"),
        ("feature_cache=./a.jsonl", "a folder of its own, not out or data's"),
        ("min_response_len=1", "min_response_len is 1; it must be at least 2"),
    ],
)
def test_a_bad_setting_is_refused(setting, reason):
    with pytest.raises(ConfigError) as error:
        read_run(None, [*NEEDED, setting])
    assert reason in str(error.value)


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_flex_attention_is_refused_on_a_cpu(device, monkeypatch):
    monkeypatch.setattr("blockdraft.train.config_file.resolve_own_device", lambda name: "cpu")
    with pytest.raises(ConfigError, match="no gradient on a CPU"):
        resolve_run([*NEEDED, "attention=flex", f"device={device}"])


def test_a_file_and_what_wins_over_it(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'target = "t"\nout = "o"\nlr = 1e-3\nseed = 4\n'
        '[answers]\nprompts = ["p.jsonl"]\nsamples = 2\n',
        encoding="utf-8",
    )
    run = read_run(path, ["lr=0.5", "answers.samples=3", "answers.temperatures=0"])
    assert (run.train.lr, run.train.seed) == (0.5, 4)
    assert run.train.data == (Path("o/answers"),)
    assert run.answers is not None
    assert run.answers.output == Path("o/answers")
    assert run.answers.target == "t"
    assert (run.answers.samples, run.answers.temperatures) == (3, (0,))
    assert run.answers.prompts == (Path("p.jsonl"),)


def test_none_leaves_unset_and_is_a_name_where_nothing_may_be_unset(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('target = "t"\nout = "none"\ndata = ["null"]\nmax_minutes = "none"\n')
    run = read_run(path, ["max_steps=5", "feature_cache=none", "init_from=./null"]).train
    assert (run.max_minutes, run.feature_cache) == (None, None)
    assert (run.out, run.data, run.init_from) == (Path("none"), (Path("null"),), Path("null"))


def test_an_empty_value_takes_back_what_the_file_says(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('target = "t"\nout = "o"\ndata = ["a"]\nfeature_cache = "states"\nlr = 0.5\n')
    run = read_run(path, ["feature_cache=", "lr="])
    default = read_run(None, ["target=t", "out=o", "data=a"]).train
    assert read_run(path, []).train.feature_cache == Path("states")
    assert (run.train.feature_cache, run.train.lr) == (None, default.lr)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"lack target, data \(or answers.prompts"):
        read_run(None, ["out=o"])
    path = tmp_path / "run.toml"
    path.write_text("lr =", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.toml.*TOML"):
        read_run(path, [])


def test_every_recipe_and_example_can_be_read():
    root = Path(__file__).parents[3]
    files = [*root.glob("recipes/**/*.toml"), *root.glob("examples/*.toml")]
    assert len(files) >= 2
    for path in files:
        read_run(path, [])
