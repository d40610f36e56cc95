"""The search for stop strings in a text that grows."""


class StopStrings:
    """Finds the first of several strings in a text that comes in pieces.

    Work for a character does not grow with the length of the strings, nor with that of the text.
    `found` is the string that was found; of several that begin at one place, the one given first.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._matches = [_Match(string) for string in strings]
        self.found: str | None = None

    @property
    def num_held(self) -> int:
        """Length of the longest end of the text that begins a string."""
        return max((match.num_matched for match in self._matches), default=0)

    def push(self, piece: str) -> int | None:
        """Take a piece of text. Where the first string that it completes begins, as an index of it.

        Negative for one that begins in earlier pieces. The search is over when it has found one.
        """
        starts = {
            start: match.string
            for match in reversed(self._matches)
            if (start := match.push(piece)) is not None
        }
        if not starts:
            return None
        start = min(starts)
        self.found = starts[start]
        return start


class _Match:
    """How much of one string the end of a text is (the search of Knuth, Morris and Pratt).

    `_borders[i]` is the length of the longest end of the first i + 1 characters of the string that
    begins it too: what is left of a match when the character behind it is another. It is computed
    as far as matches have come, since a long string is hardly ever matched far.
    """

    def __init__(self, string: str) -> None:
        self.string = string
        self._borders = [0]
        self.num_matched = 0

    def push(self, piece: str) -> int | None:
        """Where the string begins that this piece completes first, as an index of the piece."""
        string, matched = self.string, self.num_matched
        if not matched and string[0] not in piece:
            return None
        for index, character in enumerate(piece):
            while matched and string[matched] != character:
                matched = self._border(matched)
            matched += string[matched] == character
            if matched == len(string):
                return index + 1 - matched
        self.num_matched = matched
        return None

    def _border(self, length: int) -> int:
        string, borders = self.string, self._borders
        while len(borders) < length:
            border = borders[-1]
            while border and string[border] != string[len(borders)]:
                border = borders[border - 1]
            borders.append(border + (string[border] == string[len(borders)]))
        return borders[length - 1]
