"""The state of one sample."""

import tracemalloc

from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Sequence


def sequence_of(token_ids: list[int], num_prompt: int) -> Sequence:
    return Sequence(
        key=0,
        params=SamplingParams(),
        seed=0,
        sample_index=0,
        stop_ids=frozenset(),
        token_ids=token_ids,
        num_prompt=num_prompt,
    )


def test_a_sequence_takes_little_memory_beside_its_tokens():
    """Thousands may wait, and sets of their prompts would take several times as much."""
    prompts = [list(range(1000, 3000)) for _ in range(20)]
    tracemalloc.start()
    try:
        sequences = [sequence_of(prompt, len(prompt)) for prompt in prompts]
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < len(sequences) * 4000  # a list of the tokens takes 16,000 bytes


def test_the_tokens_of_a_prompt_are_one_set_without_the_output():
    sequence = sequence_of([5, 6, 5, 7], 3)
    known = sequence.prompt_ids
    sequence.append(8)
    assert known == {5, 6}
    assert sequence.prompt_ids is known


def test_an_output_is_copied_once_for_all_who_ask_between_two_tokens():
    """A grammar asks at every place of a step; the list of an earlier step stays what it was."""
    sequence = sequence_of([5, 6], 2)
    sequence.append(7)
    before = sequence.output_ids
    assert before == [7]
    assert sequence.output_ids is before
    sequence.append(8)
    assert sequence.output_ids == [7, 8]
    assert before == [7]
