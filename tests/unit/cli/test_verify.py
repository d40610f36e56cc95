"""`generate --receipt` and `verify`: exit statuses, what is printed, and refusals."""

import json

import pytest

from blockdraft.core.errors import NO, UNDECIDED
from tests.command_line import refusal, run, run_json


@pytest.fixture(scope="module")
def target(folders):
    return ["--target", str(folders[0]), "--dtype", "float32"]


@pytest.fixture(scope="module")
def answer(pair, tmp_path_factory):
    """Two samples, drafted."""
    path = tmp_path_factory.mktemp("answer") / "answer.json"
    options = ["--temperature", 1, "--n", 2, "--max-tokens", 12, "--ignore-eos", "--seed", 3]
    result = run("generate", *pair, *options, "--receipt", path, "the abc")
    assert result.exit_code == 0, result.output
    return path


def changed(answer, tmp_path, change):
    receipts = json.loads(answer.read_text(encoding="utf-8"))
    change(receipts[1])
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(receipts), encoding="utf-8")
    return path


def alter_token(receipt):
    receipt["token_ids"][4] = (receipt["token_ids"][4] + 1) % 250


def test_a_genuine_answer_is_confirmed(answer, target):
    result = run("verify", *target, answer)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("GENUINE, 12 tokens") == 2
    found = run_json("verify", *target, answer)
    assert found["verdict"] == "genuine"
    assert [one["index"] for one in found["answers"]] == [0, 1]
    assert all(one["finding"] is None and one["seconds"] > 0 for one in found["answers"])


def test_an_altered_token_is_named(answer, target, tmp_path):
    path = changed(answer, tmp_path, alter_token)
    result = run("verify", *target, path)
    assert result.exit_code == NO
    assert "sample 0: GENUINE" in result.stdout
    assert "token at output position 4: the target chooses another" in result.stdout
    result = run("verify", *target, path, "--json")
    assert result.exit_code == NO
    found = json.loads(result.stdout)
    assert found["verdict"] == "altered"
    finding = found["answers"][1]["finding"]
    own = json.loads(answer.read_text(encoding="utf-8"))[1]["token_ids"]
    assert (finding["position"], finding["expected"]) == (4, own[4])
    assert finding["margin"] > 0
    assert isinstance(finding["expected_text"], str)


def test_another_machine_is_told_and_not_accused(answer, target, tmp_path):
    def elsewhere(receipt):
        receipt["environment"]["cpu"] = "another"
        alter_token(receipt)

    result = run("verify", *target, changed(answer, tmp_path, elsewhere))
    assert result.exit_code == UNDECIDED
    assert "CANNOT TELL" in result.stdout
    assert (
        "a differing token would prove nothing here:\n    cpu: 'another' in the re" in result.stdout
    )


def test_a_receipt_without_an_environment_says_so(answer, target, tmp_path):
    path = changed(answer, tmp_path, lambda receipt: receipt.pop("environment"))
    result = run("verify", *target, path)
    assert result.exit_code == 0, result.output
    reason = "a differing token would prove nothing here:\n    the receipt names no environment\n"
    assert reason in result.stdout
    (change,) = run_json("verify", *target, path)["answers"][1]["changes"]
    assert (change["name"], change["then"]) == ("environment", None)
    assert change["now"]["exact"] is True


def test_exactness_that_is_off_on_both_sides_is_no_difference(answer, target, tmp_path):
    def inexact(receipt):
        receipt["environment"]["exact"] = False

    path = changed(answer, tmp_path, inexact)
    result = run("verify", *target, "--exact", "off", path)
    assert "exact: False in the receipt and here\n" in result.stdout


def test_comparing_times_the_audit_beside_decoding(pair, answer, target):
    found = run_json("verify", *pair, answer, "--compare")
    for one in found["answers"]:
        times = one["compare"]
        for way in ("plain", "drafted"):
            assert times[way]["num_tokens"] == 12
            share = times["audit_seconds"] / times[way]["seconds"]
            assert times[way]["audit_share"] == pytest.approx(share)
    result = run("verify", *target, "--drafter", "none", answer, "--compare")
    assert result.stdout.count("plain decoding of 12 tokens takes") == 2
    assert "drafted decoding" not in result.stdout


def test_a_single_answer_is_one_object_and_json_output_has_it_too(target, tmp_path):
    path = tmp_path / "one.json"
    options = ["--max-tokens", 5, "--ignore-eos", "--seed", 1, "--receipt", path]
    found = run_json("generate", *target, "--drafter", "none", *options, "the abc")
    receipt = json.loads(path.read_text(encoding="utf-8"))
    assert receipt["token_ids"] == found["token_ids"]
    assert run_json("verify", *target, path)["verdict"] == "genuine"
    smooth = run("generate", *target, "--drafter", "none", *options, "--smooth", "the abc")
    assert smooth.exit_code == 0, smooth.output
    assert json.loads(path.read_text(encoding="utf-8")) == receipt


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot read"),
        ("{", "cannot read"),
        ("[]", "holds no receipt; give a file that"),
        ('{"choices": [{"text": "a"}]}', "holds no receipt"),
        ('{"token_ids": [5], "prompt_token_ids": [5], "bogus": 1}', "unknown field 'bogus'"),
        ('{"token_ids": [5]}', "the receipt has no prompt"),
        ('{"token_ids": [5], "prompt_token_ids": [999]}', "token id 999 is outside"),
    ],
)
def test_what_is_no_receipt_is_refused(target, tmp_path, text, reason):
    path = tmp_path / "answer.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert reason in refusal("verify", *target, path)


def test_answers_of_which_some_lack_a_receipt_are_refused(answer, target, tmp_path):
    """Else an altered choice without one would pass beside a genuine one."""
    receipts = json.loads(answer.read_text(encoding="utf-8"))
    whole = [{"index": one["index"], "text": "a", "receipt": one} for one in receipts]
    bare = [whole[0], {"index": 1, "text": "altered"}]
    path = tmp_path / "answers.json"

    def write(found):
        path.write_text(json.dumps(found), encoding="utf-8")
        return "verify", *target, path

    assert "choice 1 of answer a-7 has no receipt" in refusal(
        *write({"id": "a-7", "choices": bare})
    )
    assert "choice 1 of answer 2 has no receipt" in refusal(
        *write([{"choices": whole}, {"choices": bare}])
    )
    for index in (0, [1]):  # that of the genuine one, and none at all
        altered = {"index": index, "text": "altered"}
        assert "has no receipt" in refusal(*write({"id": "a", "choices": [whole[0], altered]}))
    assert "answer 2 has no receipt" in refusal(*write([receipts[0], {"text": "altered"}]))
    begin = {"id": "s", "choices": [{"index": 0, "text": "a"}]}
    ends = [{"id": "s", "choices": [choice]} for choice in whole]
    chunks = [begin, *ends, {"id": "s", "choices": [], "usage": {}}]
    assert len(run_json(*write(chunks))["answers"]) == 2
    assert "choice 1 of answer s has no receipt" in refusal(
        *write([*chunks[:2], {"id": "s", "choices": bare[1:]}])
    )


def test_a_receipt_that_could_not_be_written_is_refused_at_once(target, tmp_path):
    path = tmp_path / "missing" / "r.json"
    assert "create it first" in refusal("generate", *target, "--receipt", path, "abc")
