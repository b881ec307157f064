"""The grammar that holds a reply to tool calls, or to the grammar of an answer, after the reasoning."""

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from mamba_align_jax import _values as values
from mamba_align_jax.engine.grammar import Grammar
from mamba_align_jax.serve.replies.call_rules import FRAMES
from mamba_align_jax.serve.replies.forms import ReasoningForm, ToolForm
from mamba_align_jax.serve.replies.lark import TEXT, Rules, nested


class Named(NamedTuple):
    """A `tool_choice` that names a function."""

    name: str


def grammar_of(
    reasoning: ReasoningForm | None,
    tools: ToolForm | None,
    functions: Mapping[str, object],
    choice: Literal["none", "auto", "required"] | Named,
    response: Grammar | None = None,
    *,
    parallel: bool = True,
    begins_in_reasoning: bool = False,
    strict: Collection[str] = (),
    special_tokens: Collection[str] = (),
) -> Grammar | None:
    """Write the grammar of a reply.

    - "required" and a named function: the reply is calls of one of the functions, or of that one, by their schemas.
    - "auto" with strict functions: the reply is text, calls, or text and then calls. Strict functions have arguments by
      their schemas, others any object.
    - "auto" with the grammar of an answer: the reply is such an answer, or calls.
    - "none": the reply is such an answer.

    Reasoning may come first, and must if it has begun. How far each form holds the arguments, `call_rules` says.

    Args:
        reasoning: The form of reasoning, or None.
        tools: The form of tool calls, or None.
        functions: JSON schemas of the functions' parameters, by the functions' names.
        choice: Whether functions are called.
        response: The grammar of the answer, as `response_format` and its like give it, or None.
        parallel: Several calls are allowed.
        begins_in_reasoning: The prompt ended within the reasoning.
        strict: The names of functions that are strict.
        special_tokens: The texts of the tokenizer's added tokens. Tags that are among them are single tokens.

    Returns:
        The grammar; None if nothing holds the reply.

    Raises:
        ValueError: A function must be called that is not there, or whose form isn't known.
    """
    names = {choice.name} if isinstance(choice, Named) else set(functions)
    must_call = choice == "required" or isinstance(choice, Named)
    may_call = tools is not None and bool(functions) and choice != "none"
    is_held = may_call and (must_call or bool(strict))
    values.require(
        not must_call or (may_call and names <= set(functions)), "choice", "of a function of a known form", choice
    )
    if not is_held and response is None:
        return None
    if response and not reasoning and not may_call:
        return response
    rules = Rules(special_tokens)
    # Text that may stand in place of the reasoning can't begin like it.
    text = rules.text_without(reasoning.opening) if reasoning and not begins_in_reasoning else TEXT
    bodies = [nested(response)] if response and not must_call else []
    if may_call and tools:
        allowed = {
            name: schema if must_call or name in strict else {"type": "object"}
            for name, schema in functions.items()
            if name in names
        }
        frame = FRAMES[tools.name]
        calls = frame.calls(rules, allowed, parallel=parallel)
        if must_call or response:
            bodies.append(f"{rules.sequence(frame.opening)} {calls}")
        else:
            bodies += [f"{rules.until(frame.opening, text)} {calls}", text]
    start = f"({' | '.join(map(rules.add, bodies))})"
    if reasoning:
        thought = f"{rules.until(reasoning.closing)} /\\n{{0,2}}/"
        thought = thought if begins_in_reasoning else f"({rules.sequence(reasoning.opening)} {thought})?"
        start = f"{thought} {start}"
    return rules.grammar(start)
