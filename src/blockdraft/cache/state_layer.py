"""States of layers that are no list of keys: a recurrent state, the last inputs of a convolution.

A state cannot be cut back. Where a model changes it in place, it is copied before each token that
may be taken back. Where a kernel steps, it writes every state anew: the one before the first token
that may be taken back stays, and so do the inputs of these tokens, which step again as far as they
are kept. Either way a rejection leaves the very bits that were there.
"""

from collections.abc import Callable, Container
from typing import Any

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from blockdraft.cache.kv import Capacity, KVLayer
from blockdraft.kernels.recurrence_interface import RecurrentState, RecurrentStep

_STATE = (
    *("conv_states", "recurrent_states", "has_previous_state"),
    *("is_conv_states_initialized", "is_recurrent_states_initialized"),
)
"""What transformers keeps of a layer's state: tensors by number, and what is filled."""

LayerState = dict[str, Any]
"""A copy of the state of one layer. Nobody changes it, so several may hold it."""


Again = Callable[[RecurrentState, int], RecurrentState]
"""Steps behind a state with as many of some tokens as it is told."""


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]  # transformers is untyped here
    """The state of one layer after `num_steps` tokens, and copies of it after fewer."""

    is_sliding = False

    def __init__(self, **kwargs: Any) -> None:
        LinearAttentionLayer.__init__(self, **kwargs)
        self.num_steps = 0
        self._first = self._sure = 0
        self._also: Container[int] = ()
        self._copies: dict[int, LayerState] = {}
        self._step: RecurrentStep | None = None
        """What writes the states, so that nobody changes them; None: they change in place."""
        self._again: list[tuple[int, Again]] = []
        """Of the tokens behind `_sure`: how many, and how they step again."""

    def may_return(self, sure: int, also: Container[int] = ()) -> None:
        """From here on the layer can go back to its present length, and to all from `sure` on.

        also: other lengths whose state is copied on the way.
        """
        self._first, self._sure, self._also = self.num_steps, sure, also
        copies, self._copies, self._again = self._copies, {}, []
        self._give_back(*copies.values())

    def before_step(self) -> None:
        """To be called before each token."""
        length = self.num_steps
        if length == self._first or length >= self._sure or length in self._also:
            self._copies[length] = self._present()

    def stops(self, start: int, num_tokens: int) -> list[int]:
        """The lengths at which steps from `start` on must give a state, the last one included."""
        end = start + num_tokens
        inner = [n for n in range(start + 1, end) if n == self._sure or n in self._also]
        return [*inner, end]

    def may_take_back(self, start: int) -> bool:
        """True if some of the tokens behind `start` may be taken back, up to the next stop."""
        return start >= self._sure

    def value(self) -> RecurrentState | None:
        """The present state for steps that write another one; None before the first token."""
        inputs, matrices = self.conv_states[0], self.recurrent_states[0]
        return None if inputs is None else RecurrentState(inputs, matrices)

    def stepped(
        self, step: RecurrentStep, length: int, state: RecurrentState, again: Again | None
    ) -> None:
        """Tokens up to `length` have led to this state, which is the layer's own from now on.

        again: of these tokens, where they may be taken back.
        """
        start, self._step = self.num_steps, step
        if start == self._first or start == self._sure or start in self._also:
            self._copies[start] = self._present()
        if again is not None:
            self._again.append((length - start, again))
        self._set(state, length)

    def _set(self, state: RecurrentState, length: int) -> None:
        self.conv_states[0], self.recurrent_states[0] = state.inputs, state.matrices
        for name in _STATE[2:]:
            getattr(self, name)[0] = True
        self.num_steps = length

    def _present(self) -> LayerState:
        copied = _copied if self._step is None else _same
        return {name: copied(getattr(self, name)) for name in _STATE}

    def _give_back(self, *states: LayerState) -> None:
        """Room of states that nobody needs any more goes to others."""
        if self._step is None:
            return
        held = [self._present(), *self._copies.values()]
        others = {id(state["conv_states"][0]) for state in held}
        for state in states:
            inputs, matrices = state["conv_states"][0], state["recurrent_states"][0]
            if inputs is not None and id(inputs) not in others:
                others.add(id(inputs))
                self._step.take_back(RecurrentState(inputs, matrices))

    def state_after(self, length: int) -> LayerState:
        """The copy made after `length` tokens, or one of the present state."""
        if length in self._copies:
            state = self._copies[length]
        else:
            assert length == self.num_steps, f"no state after {length} tokens was kept"
            state = self._present()
        return state if self._step is None else _copied_state(state)

    def resume(self, state: LayerState, length: int) -> None:
        """Go on behind `length` tokens that another sequence computed."""
        self._take(_copied_state(state), length)

    def _take(self, state: LayerState, length: int) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.num_steps = length

    def go_back(self, length: int) -> None:
        """The state after `length` tokens.

        A step that failed may have changed the state without being counted, so a copy is taken
        where there is one.
        """
        if length in self._copies:
            kept, before = self._copies[length], self._present()
            self._take(_copied_state(kept) if self._step is None else _shared(kept), length)
            self._give_back(before)
        elif length != self.num_steps:
            assert length in self.steps_again, f"no state after {length} tokens was kept"
            before = self._present()
            self._step_again(length)
            self._give_back(before)
        self._again = self._up_to(length)

    @property
    def steps_again(self) -> range:
        """The lengths up to which tokens can step again, from a state that was kept."""
        num_tokens = sum(num for num, _ in self._again)
        return range(self._sure, self._sure + num_tokens + 1) if num_tokens else range(0)

    def _up_to(self, length: int) -> list[tuple[int, Again]]:
        """What steps again up to a length."""
        num_left, found = length - self._sure, []
        for num_tokens, again in self._again:
            if num_left > 0:
                found.append((min(num_left, num_tokens), again))
                num_left -= num_tokens
        return found

    def _step_again(self, length: int) -> None:
        self._take(_shared(self._copies[self._sure]), self._sure)
        state = self.value()
        for num_tokens, again in self._up_to(length):
            assert state is not None
            state = again(state, num_tokens)
            self._set(state, self.num_steps + num_tokens)

    @property
    def num_bytes(self) -> int:
        """Of the state itself; each copy takes as many."""
        states = (getattr(self, name) for name in _STATE[:2])
        return sum(_num_bytes(state) for state in states)


class StateAndKVLayer(StateLayer, KVLayer):
    """A layer that has both: attention beside a recurrent mixer."""

    def __init__(self, capacity: Capacity, **kwargs: Any) -> None:
        KVLayer.__init__(self, capacity)
        StateLayer.__init__(self, **kwargs)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Of keys and values if they are given, else of a state; transformers names the latter."""
        if args:
            KVLayer.lazy_initialization(self, *args)
        else:
            StateLayer.lazy_initialization(self, **kwargs)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def _copied_state(state: LayerState) -> LayerState:
    return {name: _copied(value) for name, value in state.items()}


def _same(value: Any) -> Any:
    """The same tensors, by number or not."""
    return dict(value) if isinstance(value, dict) else value


def _shared(state: LayerState) -> LayerState:
    return {name: _same(value) for name, value in state.items()}


def _num_bytes(value: Any) -> int:
    if isinstance(value, dict):
        return sum(_num_bytes(part) for part in value.values())
    return value.nbytes if isinstance(value, Tensor) else 0
