"""A suffix automaton: where the end of a text has stood before, found token by token.

A state stands for all substrings that end at the same places. Each has the length of its longest
one, a link to the state of its longest suffix that also ends elsewhere, and the states that a next
token leads to. A token more takes constant time on average, however long the text is (Blumer et
al., 1985).
"""

from collections.abc import Iterable
from dataclasses import dataclass

START = 0
_NO_STATE = -1
_NUM_REFRESHED = 8
"""States whose last place is kept up to date behind a token: its suffixes, the longest first."""


@dataclass(frozen=True, slots=True)
class Match:
    """The last `length` tokens of some text, as a state of an automaton that knows them."""

    state: int
    length: int


NO_MATCH = Match(START, 0)


class Automaton:
    """All substrings of a text that grows at its end."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self.token_ids: list[int] = []
        self._lengths = [0]
        self._links = [_NO_STATE]
        self._next: list[dict[int, int]] = [{}]
        # The place behind an occurrence that has a token behind it, or behind the only one. It is
        # the last such place for the longest suffixes of a text, and some place for the others.
        self._ends = [0]
        self._whole = START
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    def append(self, token_id: int) -> None:
        """Let the text grow by a token."""
        self.extend((token_id,))

    def extend(self, token_ids: Iterable[int]) -> None:
        """Let the text grow; a long prompt is read at once, so nothing is looked up twice here."""
        text, lengths, links, following = self.token_ids, self._lengths, self._links, self._next
        ends, whole = self._ends, self._whole
        for token_id in token_ids:
            num = len(text)
            # What ends here has a token behind it from now on.
            state, num_left = links[whole], _NUM_REFRESHED
            while state > START and num_left:
                ends[state] = num
                state = links[state]
                num_left -= 1
            text.append(token_id)
            new, state = len(lengths), whole
            lengths.append(num + 1)
            links.append(START)
            following.append({})
            ends.append(num + 1)
            whole = new
            while state != _NO_STATE and token_id not in following[state]:
                following[state][token_id] = new
                state = links[state]
            if state == _NO_STATE:
                continue
            found = following[state][token_id]
            length = lengths[state] + 1
            if lengths[found] == length:
                links[new] = found
                continue
            # The shorter of the found substrings now end at one place more than the longer ones.
            clone = len(lengths)
            lengths.append(length)
            links.append(links[found])
            following.append(following[found].copy())
            ends.append(ends[found])
            links[found] = links[new] = clone
            while state != _NO_STATE and following[state].get(token_id) == found:
                following[state][token_id] = clone
                state = links[state]
        self._whole = whole

    def repeated(self) -> Match:
        """The longest suffix of the text that also stands earlier in it."""
        state = max(self._links[self._whole], START)
        return Match(state, self._lengths[state])

    def advanced(self, match: Match, token_id: int) -> Match:
        """The longest suffix, of what a match stands for and a token, that is in the text."""
        state, length = match.state, match.length
        # The text may have grown since: short substrings may have got a state of their own.
        while state != START and length <= self._lengths[self._links[state]]:
            state = self._links[state]
        while state != START and token_id not in self._next[state]:
            state = self._links[state]
            length = self._lengths[state]
        if token_id not in self._next[state]:
            return NO_MATCH
        return Match(self._next[state][token_id], length + 1)

    def behind(self, match: Match, num: int) -> list[int]:
        """At most `num` tokens behind an occurrence of what matches, the last one as a rule."""
        end = self._ends[match.state]
        return self.token_ids[end : end + num]
