"""Tokens and text: templates, letters as they come, stop strings, grammars, tools.

Text as it comes: `detokenizer.py` is told each committed token. `stream_decoder.py` gives the text
that is complete with it, from what the tokenizer's decoder sees in a token (`vocabulary.py`), and
`stop_strings.py` searches it. Work for a token does not grow with what stands before it.

An answer that must match a grammar:

`SamplingParams.grammar` is a value of `core/grammar.py`: a JSON schema, a regular expression, a
list of texts, or a grammar in llguidance's variant of Lark. Nothing else changes: drafting stays
on, and the rule of verification is the same.

* `grammar.py` compiles it before anything runs; what llguidance cannot follow (`uniqueItems`,
  look-around, an unknown format ...) is refused by name and never weakened. Compiled grammars are
  kept, a sequence gets its own state.
* The state answers one question: which tokens may follow *these* tokens, the sequence's output and
  those ahead in the block. The parser inside is a cursor that is moved there, backwards too. So the
  mask is a function of the tokens alone, and a rejected draft, a preemption or a step made twice
  leaves nothing behind: there is nothing to commit.
* `speculate/sampler/logits.py` applies it after penalties and logit bias, before temperature and
  filters. Ids beyond the tokenizer's, and special tokens, are never allowed. The drafter's guess
  goes through the same rule, so its blocks keep to the grammar, and what the grammar forces is
  guessed right.
* The end of the answer is a token like any other: allowed where the grammar accepts, chosen where
  nothing else is left. Hence `ignore_eos` is refused with a grammar. `min_tokens` holds the end
  back only where something else is allowed. `max_tokens`, stop strings and `stop_token_ids` cut as
  always, and an answer that was cut may not match: its finish reason is `length`, or the stop was
  asked for.
* Between the tokens of JSON stands at most one space, or one line break with up to 20 spaces,
  because a small model can otherwise write white space without end. `x-guidance` in a schema
  changes that.
* A grammar that grows too complex on the way ends its request with an error, and no other request.

Tools are text around grammars. `tools.py` checks them. `call_syntax.py` has the ways of writing
calls, and the grammar: required and named calls parse unless they are cut short, with arguments
that the function's schema accepts. With `auto` the answer is free, and `tool_calls.py` finds the
calls in it while it streams, and hands out their arguments as they are written; what is not a call
to a known function stays text. A `strict` function, or a single call at most, is kept by a grammar
that takes over where a call begins. `xml_calls.py` and `xml_syntax.py` do this for calls whose
arguments have tags of their own, `python_calls.py` and `python_syntax.py` for those that are
written as in Python; `argument_values.py` makes JSON of what stands there, and `call_parsers.py`
chooses the parser. `tool_prompt.py` gives tools to a chat template whose way of writing calls is
known; other models are told of them in a system message, and may use them badly.
"""
