"""What an answer in the format of gpt-oss must look like, see text/harmony.py."""

from collections.abc import Sequence

from blockdraft.core.grammar import Grammar
from blockdraft.text.call_syntax import json_rule, quoted
from blockdraft.text.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, RECIPIENT, START
from blockdraft.text.tools import Tool

_THOUGHT = f'thought: {CHANNEL} "analysis" {MESSAGE} TEXT {END} {START} "assistant"'
_CONSTRAINT = f'constraint: (" " {CONSTRAIN} "json" | " json")? {MESSAGE}'
_TEXT = r"TEXT: /(.|\n)*/"

FREE_TEXT = Grammar.regex(r"(.|\n)*")


def harmony_grammar(final: Grammar | None, tools: Sequence[Tool]) -> Grammar:
    """Thinking, and then a message to the user that is like `final`, or a call of a tool.

    `final` is None if there must be a call. A call ends the answer, so there is one at most.
    """
    ends = [*(["final"] if final is not None else []), *(["call"] if tools else [])]
    rules = [f"start: thought* ({' | '.join(ends)})", _THOUGHT, _TEXT]
    if tools:
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
        rules += [_call_rule(f"call_{index}", tool) for index, tool in enumerate(tools)]
        rules.append(_CONSTRAINT)
    if final is None:
        return Grammar.lark("\n".join(rules))
    rules.append(f'final: {CHANNEL} "final" {MESSAGE} @answer')
    return Grammar.lark("\n".join(rules), answer=final)


def _call_rule(rule: str, tool: Tool) -> str:
    """Models name the function behind the channel or before it."""
    name = f"{RECIPIENT}{tool.name}"
    behind = f"{CHANNEL} {quoted(f'commentary {name}')} constraint"
    before = f'{quoted(f" {name}")} {CHANNEL} "commentary" constraint'
    return f"{rule}: ({behind} | {before}) {json_rule(tool.parameters)}"
