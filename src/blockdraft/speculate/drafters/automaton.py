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
        for token_id in token_ids:
            self.append(token_id)

    def __len__(self) -> int:
        return len(self.token_ids)

    def append(self, token_id: int) -> None:
        """Let the text grow by a token."""
        lengths, links, following, ends = self._lengths, self._links, self._next, self._ends
        num = len(self.token_ids)
        # What ends here has a token behind it from now on.
        state, num_left = links[self._whole], _NUM_REFRESHED
        while state > START and num_left:
            ends[state] = num
            state, num_left = links[state], num_left - 1
        self.token_ids.append(token_id)
        new, state = len(lengths), self._whole
        self._add_state(num + 1, START, {}, num + 1)
        self._whole = new
        while state != _NO_STATE and token_id not in following[state]:
            following[state][token_id] = new
            state = links[state]
        if state == _NO_STATE:
            return
        found = following[state][token_id]
        if lengths[found] == lengths[state] + 1:
            links[new] = found
            return
        # The shorter of the found substrings now end at one place more than the longer ones.
        clone = len(lengths)
        self._add_state(lengths[state] + 1, links[found], following[found].copy(), ends[found])
        links[found] = links[new] = clone
        while state != _NO_STATE and following[state].get(token_id) == found:
            following[state][token_id] = clone
            state = links[state]

    def _add_state(self, length: int, link: int, following: dict[int, int], end: int) -> None:
        self._lengths.append(length)
        self._links.append(link)
        self._next.append(following)
        self._ends.append(end)

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
