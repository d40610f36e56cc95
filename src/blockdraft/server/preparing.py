"""What is done with a request before it waits for the engine: beside the event loop, in time."""

from collections.abc import Callable
from typing import TypeVar

from blockdraft.core.errors import RequestError
from blockdraft.core.grammar import Grammar
from blockdraft.engine.async_engine import AsyncEngine
from blockdraft.server.config import ServeConfig
from blockdraft.server.workers import Workers
from blockdraft.text.grammar import CompiledGrammar

MAX_GRAMMAR = 2**18
"""Characters of the source of a grammar; compiling one takes up to the square of its length."""
NUM_GRAMMAR_THREADS = 8
"""Many, since they share the processors: a small grammar beside slow ones is soon compiled."""
NUM_PROMPT_THREADS = 4
NUM_SHAPE_THREADS = 2
NUM_TEXT_THREADS = 2

Result = TypeVar("Result")


class Preparing:
    """Tokenizes prompts and compiles grammars, each in threads of their own.

    A request holds its places in the queue meanwhile. Those that wait for a grammar take half of
    all places if they are one client's, three quarters if several have sent them: the others are
    left to requests without a grammar, or with a known one.
    """

    def __init__(self, engine: AsyncEngine, config: ServeConfig) -> None:
        self._engine = engine
        num_places = engine.max_waiting + engine.max_running
        seconds = config.prepare_seconds
        self._prompts = Workers(
            "tokenizing the prompt",
            num_threads=NUM_PROMPT_THREADS,
            max_waiting=num_places,
            max_waiting_each=num_places,
            seconds=seconds,
            remedy="send less",
        )
        # Who only wants to know holds no place, and must hold up nobody who does.
        self._texts = Workers(
            "converting the tokens",
            num_threads=NUM_TEXT_THREADS,
            max_waiting=num_places,
            max_waiting_each=num_places // 2 + 1,
            seconds=seconds,
            remedy="send less",
        )
        # Schemas may be large; who sends none does not wait for them.
        self._shapes = Workers(
            "reading the shape",
            num_threads=NUM_SHAPE_THREADS,
            max_waiting=num_places,
            max_waiting_each=num_places,
            seconds=seconds,
            remedy="make it smaller",
            is_background=True,
        )
        self._grammars = Workers(
            "compiling the grammar",
            num_threads=NUM_GRAMMAR_THREADS,
            max_waiting=num_places * 3 // 4 + 1,
            max_waiting_each=num_places // 2 + 1,
            seconds=seconds,
            remedy="make it simpler, with fewer properties, alternatives and repetitions",
            is_background=True,
        )

    async def prompt(self, work: Callable[[], Result], client: str) -> Result:
        """Make token ids of the prompt of a request. For what this raises see Workers.run."""
        return await self._prompts.run(work, client)

    async def text(self, work: Callable[[], Result], client: str) -> Result:
        """Make token ids, or a text of them, for who only wants to know."""
        return await self._texts.run(work, client)

    async def shape(self, work: Callable[[], Result], client: str) -> Result:
        """Make a grammar of what a request says of its answer."""
        return await self._shapes.run(work, client)

    async def grammar(self, grammar: Grammar, client: str) -> CompiledGrammar:
        """Compile a grammar; those who want the same one wait for the same work.

        Raises:
            RequestError: it cannot be followed, or is too long. See also Workers.run.
        """
        found = self._engine.find_grammar(grammar)
        if found is not None:
            return found
        if grammar.num_chars > MAX_GRAMMAR:
            raise RequestError(
                f"the grammar has {grammar.num_chars} characters, and at most {MAX_GRAMMAR} are "
                "compiled; make it smaller"
            )
        return await self._grammars.run(
            lambda: self._engine.compile_grammar(grammar), client, key=grammar
        )
