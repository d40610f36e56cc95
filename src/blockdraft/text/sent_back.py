"""An answer as later turns of its conversation hold it."""

from collections.abc import Sequence

from blockdraft.text.harmony import HarmonySplitter, harmony_marks
from blockdraft.text.reasoning import ReasoningSplitter
from blockdraft.text.stream_decoder import StreamDecoder
from blockdraft.text.tokenizer import Tokenizer


def as_sent_back(
    tokenizer: Tokenizer,
    asked_ids: Sequence[int],
    answer_ids: Sequence[int],
    text: str | None = None,
) -> str:
    """An answer to `asked_ids` as clients of our server send it back: without its thinking.

    text: of the answer; unless given, that of all its tokens.
    """
    text = tokenizer.decode(answer_ids) if text is None else text
    pieces: Sequence[object]
    if harmony_marks(tokenizer):
        channels = HarmonySplitter(())
        pieces = [*channels.push(tokenizer.decode_all(answer_ids)), *channels.close()]
    elif tokenizer.thinks:
        sections = ReasoningSplitter(
            begun=tokenizer.begins_thinking(asked_ids), tags=tokenizer.thinking_tags
        )
        if shown_ids := tokenizer.without_text(tokenizer.thinking_ids.values()):
            # Marks that are special tokens have no text unless they are asked for.
            decoder = StreamDecoder(tokenizer, shown_ids=shown_ids)
            text = "".join([*map(decoder.push, answer_ids), decoder.close()])
        pieces = [*sections.feed(text), *sections.close()]
    else:
        return text
    return "".join(
        piece[1] for piece in pieces if isinstance(piece, tuple) and piece[0] == "content"
    )
