"""Files that commands leave behind are whole, or as they were."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from blockdraft.cli.bench_output import publish
from blockdraft.cli.output import check_writable
from blockdraft.core.errors import ConfigError, DiskError
from blockdraft.core.files import replace_file, reserve_disk, write_errors_named, write_whole


def test_a_report_that_cannot_be_written_leaves_the_last_one(tmp_path, monkeypatch, capsys):
    output = tmp_path / "report.json"
    publish({"a": 1}, output, as_json=False)
    assert output.read_text() == '{\n  "a": 1\n}\n'

    def fill_the_disk(path, text, **_):
        path.write_bytes(text[:3].encode())
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Path, "write_text", fill_the_disk)
    with pytest.raises(DiskError, match=r"cannot write .*report\.json: no space left; free space"):
        publish({"b": 2}, output, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"b": 2}  # not lost
    assert output.read_text() == '{\n  "a": 1\n}\n'


def test_more_than_a_disk_has_is_refused_with_both_sizes(tmp_path):
    path = tmp_path / "states"
    with pytest.raises(DiskError, match=r"states needs 1,073,741,824\.0 MiB and its disk has "):
        reserve_disk(path, 2**50)
    assert not path.exists()
    reserve_disk(path, 5)
    reserve_disk(path, 7)
    assert path.read_bytes() == bytes(7)


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_link_stays_one(tmp_path):
    file, link = tmp_path / "result.json", tmp_path / "link"
    link.symlink_to(file)
    write_whole(link, "text")
    assert link.is_symlink()
    assert file.read_text() == "text"


def test_what_takes_no_file_is_refused_before_the_work(tmp_path):
    for path, reason in [
        (tmp_path / "absent" / "file", "does not exist"),
        (tmp_path, "it is a folder"),
        (Path("/proc/file"), "no file can be created in its folder"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            check_writable(path)
    link = tmp_path / "link"
    link.symlink_to("/proc/version")  # a link, as /dev/stdout, says nothing of its own folder
    for path in (None, tmp_path / "new", link, Path("/dev/null")):
        check_writable(path)
    assert list(tmp_path.iterdir()) == [link]


def _full_disk(dir):
    return Path("/dev/full").open("wb")


def test_a_full_disk_is_said_before_the_work(tmp_path, monkeypatch):
    """It still takes a file without content."""
    monkeypatch.setattr("tempfile.TemporaryFile", _full_disk)
    with pytest.raises(DiskError, match=r"no file can be created .* \(No space left on device\)"):
        check_writable(tmp_path / "new")


def test_a_file_has_the_mode_of_any_new_file_and_nothing_is_left_of_a_failure(tmp_path):
    """safetensors gives its files to their owner alone; a server may run as somebody else."""
    (tmp_path / "usual").touch()
    path = tmp_path / "tensors.safetensors"
    replace_file(path, lambda part: save_file({"a": np.zeros(2)}, part))
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode

    def fail(part):
        part.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "no space left")

    before = path.read_bytes()
    with pytest.raises(OSError, match="no space"):
        replace_file(path, fail)
    assert path.read_bytes() == before
    assert sorted(own.name for own in tmp_path.iterdir()) == ["tensors.safetensors", "usual"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EDQUOT, errno.ENOSPC])
def test_a_line_that_cannot_be_written_names_its_file(tmp_path, number):
    path = tmp_path / "result.part.jsonl"
    with (
        pytest.raises(DiskError, match=rf"cannot write to {path}: .*start again, which continues"),
        write_errors_named(path),
    ):
        raise OSError(number, os.strerror(number))
