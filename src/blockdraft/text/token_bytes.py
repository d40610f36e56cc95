"""The bytes that a token stands for; a character may be split over several tokens."""

from blockdraft.text.tokenizer import Tokenizer
from blockdraft.text.vocabulary import byte_of_letter, spelled_byte

_WORD_START = "\u2581"


class TokenBytes:
    """Looks up tokens of a tokenizer, byte-level BPE or SentencePiece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        backend = tokenizer.backend
        self._backend = backend
        self._special = {
            token_id: token.content
            for token_id, token in backend.get_added_tokens_decoder().items()
        }
        self._byte_of = byte_of_letter() if tokenizer.vocabulary.is_byte_level else None

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id that only pads the vocabulary."""
        if token_id in self._special:
            return self._special[token_id].encode()
        name = self._backend.id_to_token(token_id)
        if name is None:
            return b""
        if self._byte_of is not None:
            return bytes(self._byte_of[letter] for letter in name if letter in self._byte_of)
        if (byte := spelled_byte(name)) is not None:
            return byte
        return name.replace(_WORD_START, " ").encode()

    def text_of(self, token_id: int) -> str:
        """The text of a token; a part of a character is spelled, as in bytes:\\xe2\\x82."""
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
