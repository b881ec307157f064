"""Text on a terminal as it is generated: one answer, or a conversation whose later turns come from the cache."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.running.engine import Engine
from mamba_align_jax.engine.scheduling.request import RequestOutput, RequestUpdate
from mamba_align_jax.engine.text.chat_template import ChatTemplate
from mamba_align_jax.engine.text.tokenizer import Tokenizer

HELP = "/new begins another conversation, /exit or Ctrl-D ends, Ctrl-C ends an answer."


def stream(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Generator[RequestUpdate, None, None]:
    """Runs one request, and yields what is new of it. Its caller alone steps the engine.

    If the iterator is closed before its end, or anything is raised, the request is aborted.

    Raises:
        ValueError: The request can never run.
        Exception: The exception that ended the request.
    """
    yield from _updates(engine, engine.add_request(prompt, params))


def _updates(engine: Engine, request_id: int) -> Generator[RequestUpdate, None, None]:
    """Yields what is new of a request that the engine has."""
    try:
        while True:
            for update in engine.step_outputs():
                if update.request_id != request_id:
                    continue
                yield update
                if update.output is not None:
                    if update.output.error is not None:
                        raise update.output.error
                    return
    finally:
        engine.abort(request_id)


class Conversation:
    """A conversation with a model.

    Attributes:
        messages: What was said so far, each with its "role" and "content".
        output: The output of the last turn; None before the first one has ended.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, template: ChatTemplate, params: SamplingParams, system: str = ""
    ) -> None:
        """Begins a conversation, which the engine serves alone. `system` is what the model is told first, if it isn't empty.

        An answer is shorter than `params.max_tokens` if the model has no room for it.
        """
        self._engine, self._tokenizer, self._template, self._params = engine, tokenizer, template, params
        self._longest = engine.longest_sequence
        self.messages = [{"role": "system", "content": system}] if system else []
        self.output: RequestOutput | None = None

    def say(self, text: str) -> Generator[str, None, None]:
        """Says something, and yields the answer as it comes. An answer that is left early stays as far as it was said.

        Raises:
            ValueError: The conversation has become longer than the model can read, or the template or the engine refuses
                it. Then nothing was said.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._tokenizer.encode(self._template.render(messages), add_special_tokens=False)
        room = self._longest - len(prompt)
        if room < 1:
            raise ValueError(f"the conversation has {len(prompt)} tokens, and the model reads {self._longest}")
        params, answer = replace(self._params, max_tokens=min(self._params.max_tokens, room)), ""
        request_id = self._engine.add_request(prompt, params)
        self.output = None
        try:
            with contextlib.closing(_updates(self._engine, request_id)) as updates:
                for update in updates:
                    answer += update.text or ""
                    self.output = update.output
                    yield update.text or ""
        finally:
            self.messages = [*messages, {"role": "assistant", "content": answer}]

    @property
    def cached(self) -> str:
        """Says how much of the last prompt came from the cache, and how fast the answer came."""
        if self.output is None:
            return "The answer was interrupted."
        output, size = self.output, len(self.output.prompt_token_ids)
        said = f"{output.num_cached_tokens} of {size} prompt tokens came from the cache"
        if output.num_cached_tokens:
            said += f" ({output.num_cached_tokens / size:.0%})"
        if output.ttft_s is not None:
            said += f"; first token after {output.ttft_s * 1e3:.0f} ms"
        if output.tpot_s:
            said += f", then {1 / output.tpot_s:.0f} tokens/s"
        return said


def talk(
    begin: Callable[[], Conversation], ask: Callable[[], str], write: Callable[[str], None], note: Callable[[str], None]
) -> None:
    """Lets a user talk with a model until the input ends.

    `begin` makes a conversation. `ask` returns what the user types next, and raises EOFError at the end. `write` writes
    a piece of an answer, and `note` a line about the conversation.
    """
    conversation = begin()
    note(HELP)
    while True:
        try:
            text = ask()
        except (EOFError, KeyboardInterrupt):
            return
        command = text.strip()
        if command == "/exit":
            return
        if command == "/new":
            conversation = begin()
        elif command.startswith("/"):
            note(HELP)
        elif command:
            _answer(conversation, text, write, note)


def _answer(conversation: Conversation, text: str, write: Callable[[str], None], note: Callable[[str], None]) -> None:
    try:
        with contextlib.closing(conversation.say(text)) as pieces:
            for piece in pieces:
                write(piece)
    except KeyboardInterrupt:
        pass
    except ValueError as error:
        note(str(error))
        return
    write("\n")
    note(conversation.cached)
