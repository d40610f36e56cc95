"""The reader of JSONL files."""

import gzip
import re

import pytest

from blockdraft.core.errors import ConfigError
from blockdraft.core.jsonl import read_jsonl

ROWS = "\n".join(f'{{"n": {number}}}' for number in range(500)) + "\n"


def test_rows_come_with_the_numbers_of_their_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"n": 1}\n \n{"n": 2}', encoding="utf-8")
    assert list(read_jsonl(path)) == [(2, {"n": 1}), (4, {"n": 2})]
    assert list(read_jsonl(path, is_growing=True)) == [(2, {"n": 1}), (4, {"n": 2})]
    path.write_text('{"n": 1}\n{"n": 2', encoding="utf-8")
    assert list(read_jsonl(path, is_growing=True)) == [(1, {"n": 1})]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path, name):
    content = '\ufeff{"n": "\ufeff"}\n'.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert list(read_jsonl(tmp_path / name)) == [(1, {"n": "\ufeff"})]


@pytest.mark.parametrize("keep", [4, 200, -4])
def test_a_cut_off_archive_is_refused(tmp_path, keep):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(ROWS.encode()))
    assert len(list(read_jsonl(path))) == 500
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz"):
        list(read_jsonl(path))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{}\n[1]\n", "line 2: it is not a JSON object"),
        (b"{}\n{\n", "line 2: invalid JSON"),
        (b"{}\n\xff\n", "line 2: it is not in UTF-8"),
        (b"{}\n" + '{"n": "\u00e9"}'.encode("latin-1"), "line 2: it is not in UTF-8"),
        ('{"n": 1}\n'.encode("utf-16"), "line 1: it is not in UTF-8"),
        (b'[\n {"n": 1},\n {"n": 2}\n]\n', "line 1: the file is one JSON list; .*jq"),
        (b'\xef\xbb\xbf[{"n": 1}]', "line 1: the file is one JSON list; .*jq"),
        (b"3\n", "line 1"),
        (b"{}\n" + b"[" * 100_000 + b"\n", "line 2: invalid JSON"),
        (b'{"id": "\\uD83D\\uDE00"}\n{"id": "\\uDE00"}\n', "line 2: .*half a character"),
    ],
)
def test_bad_content_is_refused_with_its_place(tmp_path, content, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as error:
        list(read_jsonl(path))
    assert "a.jsonl" in str(error.value)


def test_bad_rows_may_be_told_instead_of_raised(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n[1]\n{oops\n{"n": 4}\n', encoding="utf-8")
    bad = []
    rows = list(read_jsonl(path, on_bad_row=bad.append))
    assert rows == [(1, {"n": 1}), (4, {"n": 4})]
    assert [re.search(r"line \d", str(error))[0] for error in bad] == ["line 2", "line 3"]


def test_what_is_no_file_or_no_archive_is_refused(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(b"plain")
    for name in ("none.jsonl", "a.jsonl.gz", "."):
        with pytest.raises(ConfigError, match="cannot read"):
            list(read_jsonl(tmp_path / name))
