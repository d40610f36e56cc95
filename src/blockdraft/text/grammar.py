"""Grammars: which tokens may come next, so that the whole answer belongs to a language."""

import json
import re
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import chain, takewhile
from threading import Thread
from time import perf_counter
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax
from numpy.typing import NDArray

from blockdraft.core.errors import RequestError
from blockdraft.core.grammar import Grammar
from blockdraft.text.tokenizer import Tokenizer

MAX_COMPILED = 64
"""Compiled grammars that are kept; the one unused for longest goes first."""

JSON_WHITESPACE = r" |\n {0,20}"
"""Between the tokens of JSON one space, or a new line with its indentation: a model that has lost
its way could otherwise write white space without end. A schema's `x-guidance` may say otherwise."""

MAX_LEXER_STATES = 50_000
"""Of a compiled grammar, at one or two kilobytes each."""

_LEXER_IS_FULL, _STEP_IS_COSTLY = "too many states", "too many expressions"
"""In llguidance's errors; others come again, however often the grammar is renewed."""
_MOST_COSTLY_STEPS = 3
"""Of a sequence: others may have caused one; more are its own, and all wait for them."""
_STEP_FUEL = 2_000_000
"""Work of the lexer for one token, about 20 ms, which others wait for. What it takes depends on
what was met before, also in drafts and in other requests: so the limit is ten times llguidance's
own."""
_LONGEST_RENEWAL = 1.0
"""Seconds for which all sequences may have to wait for one."""

_LIMITS = LLParserLimits(
    max_lexer_states=MAX_LEXER_STATES, step_lexer_fuel=_STEP_FUEL, verbose_errors=False
)
_NOT_SUPPORTED = re.compile(
    r"^\s*\w+\s*\[[^\]\n]*?\b(max_tokens|stop|temperature)\s*=", re.MULTILINE
)
"""Attributes of Lark rules: the parser cannot go back over the first two, as it must where a draft
is rejected, and nobody obeys the last one."""

_ESCAPED = re.compile(r"\\([^\w\s])")

Mask = NDArray[np.bool_]


class Grammars:
    """Compiles grammars for a tokenizer; `vocab_size` is the width of the target's logits."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._recent = lru_cache(MAX_COMPILED)(self._found_or_compiled)
        self._alive: WeakValueDictionary[Grammar, CompiledGrammar] = WeakValueDictionary()

    @cached_property
    def _ll_tokenizer(self) -> LLTokenizer:
        """Made when first needed: it takes a moment for a large vocabulary."""
        eos_ids = sorted(self._tokenizer.eos_ids)
        if not eos_ids:
            raise RequestError("the target defines no token that ends an answer; leave out grammar")
        return LLTokenizer(self._tokenizer.backend.to_str(), eos_token=eos_ids)

    def compile(self, grammar: Grammar) -> "CompiledGrammar":
        """Compile a grammar; it is known for as long as somebody holds what is returned, or longer.

        Raises:
            RequestError: llguidance refuses it, or no answer can begin with it.
        """
        return self._recent(grammar)

    def find(self, grammar: Grammar) -> "CompiledGrammar | None":
        """What `compile` would return at once; None if it would have to work."""
        found = self._alive.get(grammar)
        return None if found is None else self._recent(grammar)

    def start(self, grammar: Grammar) -> "GrammarState":
        """The state of a sequence that has no output yet.

        Raises:
            RequestError: as `compile`.
        """
        return GrammarState(self._recent(grammar), self._vocab_size)

    def _found_or_compiled(self, grammar: Grammar) -> "CompiledGrammar":
        found = self._alive.get(grammar)
        if found is None:
            found = self._alive[grammar] = self._compile(grammar)
        return found

    def _compile(self, grammar: Grammar) -> "CompiledGrammar":
        try:
            self._check(grammar)
            compiled = CompiledGrammar(self._ll_tokenizer, _llguidance_source(grammar))
            GrammarState(compiled, self._vocab_size).allowed([], [])
        except (RequestError, ValueError, RecursionError) as error:
            raise _refusal(grammar, str(error)) from error
        return compiled

    def _check(self, grammar: Grammar) -> None:
        """Raise a RequestError for what llguidance would take, and do otherwise than is asked."""
        if grammar.kind == "lark" and (found := _NOT_SUPPORTED.search(grammar.source)):
            raise RequestError(f"{found[1]}= is not supported; leave it out, or use suffix=")
        added = self._tokenizer.backend.get_added_tokens_decoder().values()
        special = [token.content for token in added if token.special]
        for text in _literals(grammar):
            for content in special:
                if content in text:
                    raise RequestError(
                        f"it asks for the text {content!r}, which is a special token of the "
                        "target and cannot be written as text; leave it out"
                    )
        for _, part in grammar.parts:
            self._check(part)


class CompiledGrammar:
    """A parser at its start, from which the sequences' own are copied.

    Copies share the lexer's states, which are counted: the copy that meets one too many fails, and
    so do all others then. A renewed grammar has met none.
    """

    def __init__(self, tokenizer: LLTokenizer, source: str) -> None:
        self.num_tokens = tokenizer.vocab_size
        self._tokenizer, self._source = tokenizer, source
        self._renewing: Thread | None = None
        self._renew()
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())

    def _renew(self) -> None:
        started = perf_counter()
        self._matcher = LLMatcher(self._tokenizer, self._source, log_level=0, limits=_LIMITS)
        self._seconds = perf_counter() - started

    def renew_soon(self) -> bool:
        """Make the parser anew; False if that takes long, and so is done in the background.

        All sequences wait for the one that asks.
        """
        if self._seconds <= _LONGEST_RENEWAL:
            self._renew()
            return True
        if self._renewing is None or not self._renewing.is_alive():
            self._renewing = Thread(target=self._renew, name="renewing a grammar", daemon=True)
            self._renewing.start()
        return False

    def copy(self) -> LLMatcher:
        """A parser for one sequence."""
        return self._matcher.deep_copy()


class GrammarState:
    """Which tokens may follow in one sequence (rollback and masks by llguidance).

    The answer is a function of the tokens given and of nothing else. The parser inside is a cursor
    that is moved to their end, back over what was drafted and rejected: there is nothing to commit,
    and nothing that a rejected draft, a preemption or a repeated step could leave behind.
    """

    def __init__(self, compiled: CompiledGrammar, vocab_size: int) -> None:
        self._compiled = compiled
        self._vocab_size = vocab_size
        self._num_costly_steps = 0
        self._reset()

    def _reset(self) -> None:
        self._matcher = self._compiled.copy()
        self._num_committed = 0
        self._behind: list[int] = []  # consumed tokens behind the committed ones

    def allowed(self, output_ids: list[int], ahead: list[int]) -> Mask | None:
        """The tokens [V] that may follow the output and `ahead`; the output only ever grows.

        None if `ahead` has already left the grammar, or the answer has ended: what follows is not
        kept.

        Raises:
            RequestError: the grammar is too complex to be followed further, or it asks for text
                that the target's vocabulary cannot write.
        """
        mask = self._mask_behind(output_ids, ahead)
        reason = self._matcher.get_error() if self._matcher.is_error() else ""
        is_costly = _STEP_IS_COSTLY in reason and self._num_costly_steps < _MOST_COSTLY_STEPS
        # It stays so for good, and what others have met has caused it too: once more, alone.
        if (is_costly or _LEXER_IS_FULL in reason) and self._compiled.renew_soon():
            self._num_costly_steps += is_costly
            self._reset()
            mask = self._mask_behind(output_ids, ahead)
        if self._matcher.is_error():
            reason = self._matcher.get_error()
            self._reset()
            raise RequestError(_one_line(f"the grammar cannot be followed further: {reason}"))
        if self._num_committed < len(output_ids) and not self._matcher.is_stopped():
            raise RequestError(
                "the grammar cannot be followed further: it is too complex, or asks for text that "
                "no token of the target's vocabulary spells"
            )
        if mask is not None and not mask.any():
            raise RequestError("no token of the target's vocabulary continues the grammar")
        return mask

    def num_allowed(self, output_ids: list[int], ahead: list[int]) -> int:
        """How many of the tokens `ahead` may follow the output, one behind the other; no masks.

        The end of the answer is none of them. All, where the parser fails: `allowed` says so when a
        token is chosen.
        """
        self._move_to(output_ids, ahead)
        if self._matcher.is_error():
            self._reset()
            return len(ahead)
        return len(self._behind) if self._num_committed == len(output_ids) else 0

    def _mask_behind(self, output_ids: list[int], ahead: list[int]) -> Mask | None:
        """The mask without checks: it means nothing if the parser has failed."""
        if not self._move_to(output_ids, ahead):
            return None
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)

    def _move_to(self, output_ids: list[int], ahead: list[int]) -> bool:
        """Move the parser; False if the grammar refuses a token on the way."""
        path = output_ids[self._num_committed :] + ahead
        num_same = _num_same(path, self._behind)
        if num_same < len(self._behind):
            self._matcher.rollback(len(self._behind) - num_same)
        # An id that no token has would be an error for the parser, and not just refused.
        new = list(
            takewhile(lambda token_id: token_id < self._compiled.num_tokens, path[num_same:])
        )
        reached = path[: num_same + self._matcher.try_consume_tokens(new)]
        num_new = min(len(output_ids) - self._num_committed, len(reached))
        self._num_committed += num_new
        self._behind = reached[num_new:]
        return len(reached) == len(path)


def _num_same(one: list[int], other: list[int]) -> int:
    """Length of the common beginning."""
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)


def _literals(grammar: Grammar) -> Iterator[str]:
    """Texts that the answer may have to hold as they stand, as far as they are easily seen."""
    if grammar.kind == "choice":
        yield from grammar.options
    elif grammar.kind == "regex":
        yield from _pattern_literals(grammar.source)
    elif grammar.kind == "json_schema":
        yield from _schema_literals(json.loads(grammar.source))


def _schema_literals(schema: Any) -> Iterator[str]:
    """Names of properties, constants, choices and patterns."""
    if isinstance(schema, list):
        for own in schema:
            yield from _schema_literals(own)
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in ("const", "enum", "required"):
            yield json.dumps(value, ensure_ascii=False)
        elif key == "pattern":
            yield from _pattern_literals(str(value))
        elif key == "properties" and isinstance(value, dict):
            yield from value
            yield from _schema_literals(list(value.values()))
        elif key not in ("default", "examples"):
            yield from _schema_literals(value)


def _pattern_literals(pattern: str) -> Iterator[str]:
    """A regular expression as it stands, and without what escapes letters that mean more."""
    yield pattern
    yield _ESCAPED.sub(r"\1", pattern)


def _llguidance_source(grammar: Grammar) -> str:
    if not grammar.parts:
        return _single_source(grammar)
    return json.dumps({"grammars": _all_grammars(grammar, "start")})


def _all_grammars(grammar: Grammar, name: str) -> list[dict[str, str]]:
    """A grammar and all that it refers to, in llguidance's form."""
    source = _single_source(grammar)
    if grammar.kind in ("json_schema", "regex"):
        (own,) = json.loads(source)["grammars"]
    else:
        own = {"lark_grammar": source}
    parts = [_all_grammars(part, part_name) for part_name, part in grammar.parts]
    return [{**own, "name": name}, *chain.from_iterable(parts)]


def _single_source(grammar: Grammar) -> str:
    if grammar.kind == "json_schema":
        # Only the options left open by the schema's own x-guidance.
        return LLMatcher.grammar_from_json_schema(
            grammar.source, defaults={"whitespace_pattern": JSON_WHITESPACE}
        )
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.source)
    if grammar.kind == "choice":
        options = (json.dumps(option, ensure_ascii=False) for option in grammar.options)
        # A terminal: the parser itself follows 2,000 alternatives at most.
        return LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(options))
    return LLMatcher.grammar_from_lark(_as_lark(grammar.source))


def _as_lark(source: str) -> str:
    """Other engines take GBNF, which cannot be mistaken for Lark: its rules have another mark."""
    if "::=" not in source or is_lark_syntax(source):
        return source
    try:
        return gbnf_to_lark(source)
    # The converter fails in any way where there is no GBNF.
    except Exception as error:
        raise RequestError(f"neither Lark nor GBNF: {error}") from error


def _refusal(grammar: Grammar, reason: str) -> RequestError:
    name = {"json_schema": "JSON schema", "lark": "Lark grammar"}.get(grammar.kind, grammar.kind)
    return RequestError(f"the {name} {grammar.source!r:.60} cannot be used: {_one_line(reason)}")


def _one_line(text: str) -> str:
    """Without the stack of a panic, which with RUST_BACKTRACE names files of this machine."""
    return " ".join(text.partition("<backtrace>")[0].split())
