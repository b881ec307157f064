"""Cuts a reply into reasoning, answer and tool calls, as its text comes."""

from collections.abc import Generator, Mapping

from mamba_align_jax.serve.replies.forms import ReasoningForm, ToolForm
from mamba_align_jax.serve.replies.parts import Content, Part, Reasoning, joined
from mamba_align_jax.serve.replies.schemas import Schemas
from mamba_align_jax.serve.replies.unread import WHITESPACE, NotACall, Tags, Unread, following

_Text = type[Reasoning] | type[Content]


def begins_in_reasoning(prompt_text: str, form: ReasoningForm | None) -> bool:
    """Say whether a reply begins within the reasoning: the prompt ends with the opening tag, and perhaps whitespace."""
    return form is not None and prompt_text.rstrip(WHITESPACE).endswith(form.opening)


class ReplyParser:
    """Cuts the reply of one choice into its parts, as its text comes.

    The text is what the tokens decode to, without the end token; with special tokens if a form `needs_special_tokens`. The
    joined parts are the same wherever the text is cut, and the work is linear in the text's length. Only what may still
    change is held back: the beginning of a tag, whitespace, and a call until it is whole.

    - Reasoning stands at the beginning of a reply, or nowhere.
    - Whitespace before and after a call is dropped. A call whose arguments are whole counts also if the reply ends within
      its closing tags.
    - A call that can't be read is part of the answer, with exactly its text. Calls are looked for again behind the point
      where it failed.
    - A call of a function that the request doesn't have is a call, as in vLLM: the client can tell the model so.

    Attributes:
        reasoning_end: The number of characters of the reasoning with its tags, from the reply's beginning; 0 if there is
            none, and None while it is not known.
    """

    def __init__(
        self,
        reasoning: ReasoningForm | None,
        tools: ToolForm | None,
        functions: Mapping[str, object],
        *,
        begins_in_reasoning: bool = False,
    ) -> None:
        """Begin a reply.

        Args:
            reasoning: The form of reasoning; None to take it for a part of the answer.
            tools: The form of tool calls; None to take them for a part of the answer.
            functions: JSON schemas of the functions' parameters, by the functions' names.
            begins_in_reasoning: The prompt ended within the reasoning.
        """
        self.reasoning_end: int | None = None if reasoning else 0
        self._num_characters = 0
        self._reasoning = reasoning
        self._tools = tools
        self._schemas = Schemas(functions)
        self._begun = begins_in_reasoning
        self._openings = Tags(*tools.openings) if tools else None
        self._unread = Unread()
        self._parts: list[Part] = []
        self._spaces: list[str] = []  # whitespace that is dropped if a tag follows
        self._dropped = ""  # characters that are dropped before the next part
        self._steps = self._read()

    def add(self, text: str) -> list[Part]:
        """Add text of the reply. Returns what it settles."""
        self._num_characters += len(text)
        self._unread.add(text)
        next(self._steps, None)
        return self._settled()

    def end(self) -> list[Part]:
        """End the reply. Returns what was held back."""
        self._unread.ended = True
        for _ in self._steps:
            pass
        return self._settled()

    def _settled(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return joined(parts)

    def _read(self) -> Generator[None, None, None]:
        """Read the reply. Yields where more text is needed."""
        tag = ""
        if self._reasoning:
            tag = yield from self._read_reasoning(self._reasoning)
            if self.reasoning_end is None:
                self.reasoning_end = self._num_characters - len(self._unread.text) + self._unread.at - len(tag)
        while True:
            if not tag:
                tag = yield from self._read_text(Content, self._openings, holds_spaces=True)
            if not tag or not self._tools:
                return
            yield from self._read_calls(self._tools, tag)
            tag = ""

    def _read_reasoning(self, form: ReasoningForm) -> Generator[None, None, str]:
        """Read the reasoning, if there is any. Returns the opening tag of a call if that ended it."""
        if not self._begun:
            spaces, tag = yield from following(self._unread, Tags(form.opening))
            if tag is None:
                self.reasoning_end = 0
                self._say(Content, spaces, holds_spaces=True)
                return ""
        openings = self._tools.openings if self._tools and form.ends_at_calls else ()
        self._dropped = "\r\n" if form.trims else ""
        tag = yield from self._read_text(Reasoning, Tags(form.closing, *openings), holds_spaces=form.trims)
        self._spaces = []
        self._dropped = "\r\n" if form.trims else ""
        return tag if tag in openings else ""

    def _read_text(self, kind: _Text, tags: Tags | None, *, holds_spaces: bool) -> Generator[None, None, str]:
        """Read text to the first of the tags. Returns the tag; empty if the reply has ended, with all whitespace said."""
        while True:
            if tags is None:
                text, tag = self._unread.take_to(len(self._unread.text)), ""
            else:
                text, tag = self._unread.take_until(tags)
            self._unread.forget()
            self._say(kind, text, holds_spaces=holds_spaces and tags is not None)
            if tag:
                return tag
            if self._unread.ended:
                self._say(kind, "", holds_spaces=False)
                return ""
            yield

    def _read_calls(self, tools: ToolForm, tag: str) -> Generator[None, None, None]:
        """Read the calls behind an opening tag; what is no call is said."""
        try:
            for call in tools.read(self._unread, tag, self._schemas):
                if call is None:
                    yield
                else:
                    self._parts.append(call)
                    self._unread.forget()
                    self._spaces, self._dropped, tag = [], WHITESPACE, ""
        except NotACall:
            self._say(Content, tag + self._unread.forget(), holds_spaces=True)

    def _say(self, kind: _Text, text: str, *, holds_spaces: bool) -> None:
        """Add a piece to the parts, without the whitespace at its end if that is to be held."""
        text = text.lstrip(self._dropped) if self._dropped else text
        if text:
            self._dropped = ""
        said = text.rstrip(WHITESPACE) if holds_spaces else text
        if said or not holds_spaces:
            if whole := "".join(self._spaces) + said:
                self._parts.append(kind(whole))
            self._spaces = []
        if said != text:
            self._spaces.append(text[len(said) :])
