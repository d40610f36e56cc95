"""What the scheduler asks of the K/V memory."""

from collections.abc import Sequence


class Memory:
    """Room for the K/V of sequences, addressed by their keys.

    This one has no limit: every sequence has its own K/V, and nothing is reused. See `Pages`.
    """

    @property
    def num_tokens(self) -> int:
        """The most tokens that all sequences together can hold."""
        return 2**62

    def open(
        self, key: int, token_ids: Sequence[int], *, with_context: bool, longest: int = 0
    ) -> int:
        """Start a sequence; returns how many of its first tokens need not be computed again.

        `with_context`: the drafter has the features of these tokens too. `longest`: the most tokens
        that it may ever have.
        """
        return 0

    def num_shared(
        self, key: int, token_ids: Sequence[int], other_key: int, other_ids: Sequence[int]
    ) -> int:
        """How many first tokens `open` could take over from another sequence; both are open.

        Asked again and again, so it may take no time for each token.
        """
        return 0

    def reserve(self, key: int, num_tokens: int) -> bool:
        """Give a sequence room for so many tokens; False, and nothing changes, if there is none."""
        return True

    def room(self, key: int) -> int:
        """Tokens that a sequence has room for."""
        return self.num_tokens

    def trim(self, key: int, num_tokens: int) -> None:
        """Take back what a sequence has room for beyond so many tokens."""

    def publish(self, key: int, token_ids: Sequence[int], num_tokens: int) -> None:
        """The first `num_tokens` tokens are committed and written: others may reuse them."""

    def put_back(self, key: int) -> None:
        """Undo `open` for a sequence that is opened again later; unknown keys are fine."""

    def close(self, key: int) -> None:
        """Forget a sequence; unknown keys are fine, it may never have run."""
