"""What an operator chooses: names, keys, and the limits of what one client may ask for. Imports no server library."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from mamba_align_jax import _values as values
from mamba_align_jax._options import option
from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.serve.replies.forms import REASONING_FORMS, TOOL_FORMS

WARMUPS = ("none", "usual", "full")
TOOL_CALL_PARSERS, REASONING_PARSERS = ("auto", "none", *TOOL_FORMS), ("auto", "none", *REASONING_FORMS)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much one client may ask for, field by field. Whatever exceeds a limit is refused with a status and a reason."""

    body_bytes: int = option(4 * 2**20, "Size of a call's body")
    body_values: int = option(2**16, "Number of texts (names of fields, too), lists and objects in a call's body")
    head_bytes: int = option(64 * 2**10, "Size of a call's first line and headers")
    prompts: int = option(128, "Number of prompts of one call")
    choices: int = option(16, "Number of choices for each prompt, `n`")
    stop_strings: int = option(16, "Number of strings in `stop`, and of tokens in `stop_token_ids`")
    stop_length: int = option(256, "Characters of each string in `stop`")
    logit_bias: int = option(300, "Number of entries of `logit_bias`")
    logprobs: int = option(20, "Number of the most likely tokens that are reported for each token")
    messages: int = option(1024, "Number of messages of a chat")
    tools: int = option(128, "Number of tools of a call, and of tool calls in a message")
    tool_bytes: int = option(256 * 2**10, "Size of all tools of a call")
    json_depth: int = option(64, "Objects and lists within each other in tools, arguments and `chat_template_kwargs`")
    grammar_bytes: int = option(64 * 2**10, "Size of a JSON schema")
    grammar_s: float = option(
        2.0, "Seconds of CPU time that a JSON schema may take to compile, more than 0 and at most a day"
    )
    connections: int = option(1024, "Number of connections that have calls at once")
    receive_s: float = option(30.0, "Seconds in which a call's head must have arrived, and then its body")
    send_s: float = option(30.0, "Seconds for which a client may leave an answer unread")
    call_s: float = option(600.0, "Seconds from when a call's requests are queued to the end of its answer")
    drain_s: float = option(30.0, "Seconds that running calls get to finish when the server is told to stop")

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "grammar_s":
                value = values.time_limit(item.name, value)
            elif item.name.endswith("_s"):
                value = values.number(item.name, value, 0, values.FLOAT32_MAX, "seconds, at least 0")
            else:
                value = values.integer(item.name, value, 1)
            object.__setattr__(self, item.name, value)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an engine is served.

    Attributes:
        model_name: The model's name in the API and in metrics.
        model_aliases: Other names by which calls may mean it. Answers have `model_name`.
        allowed_hosts: The names by which clients may call the server, in the headers `host` and `origin`, besides those of
            this machine. Without any, a server that listens on more than this machine does not check them.
        api_keys: The keys that clients may have; without any, no key is asked for. Clients with different keys never
            share cached prefixes.
        admin_keys: The keys of administrators, who may reset the cache. Without any, those addresses do not exist.
        sampling_defaults: Fields of `SamplingParams` for calls that leave them out, as
            `mamba_align_jax.models.config_files.read_sampling_defaults` returns them.
        seed: Draws the seeds of calls that have none, one after the other; None draws numbers that nobody can guess.
        min_priority: The smallest priority number that a client may ask for. Those with smaller numbers run first, so
            with 0 clients may let others go first, and no more.
        warmup: What is compiled before the server is ready: "usual" programs, "full" for those too that change logits or
            report their probabilities, or "none". If `sampling_defaults` change logits, "usual" is "full". What is left
            out is compiled by the first call that needs it, and all others wait meanwhile.
        tool_call_parser: The form in which the model writes tool calls, one of `TOOL_FORMS`; "auto" takes that of the chat
            template, and "none" is none.
        reasoning_parser: The form of its reasoning, one of `REASONING_FORMS`, "auto" or "none".
        limits: What one client may ask for.
    """

    model_name: str = "model"
    model_aliases: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    min_priority: int = 0
    warmup: str = "usual"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        values.require(bool(values.text("model_name", self.model_name)), "model_name", "text", self.model_name)
        object.__setattr__(self, "model_aliases", values.texts("model_aliases", self.model_aliases))
        object.__setattr__(self, "allowed_hosts", values.texts("allowed_hosts", self.allowed_hosts))
        object.__setattr__(self, "seed", values.optional_integer("seed", self.seed, 0))
        for name in ("api_keys", "admin_keys"):
            object.__setattr__(self, name, _keys(name, getattr(self, name)))
        SamplingParams(**self.sampling_defaults)
        object.__setattr__(self, "min_priority", values.integer("min_priority", self.min_priority))
        values.choice("warmup", self.warmup, WARMUPS)
        values.choice("tool_call_parser", self.tool_call_parser, TOOL_CALL_PARSERS)
        values.choice("reasoning_parser", self.reasoning_parser, REASONING_PARSERS)
        values.require(isinstance(self.limits, Limits), "limits", "Limits", self.limits)


def _keys(name: str, keys: Any) -> tuple[str, ...]:
    """Checks keys. Their values are secrets, so errors leave them out."""
    values.require(isinstance(keys, tuple | list), name, "a sequence of keys", type(keys))
    for key in keys:
        is_key = isinstance(key, str) and key.isascii() and key.isprintable() and key.strip() == key and bool(key)
        values.require(is_key, name, "printable ASCII without spaces around it", type(key))
    return tuple(keys)
