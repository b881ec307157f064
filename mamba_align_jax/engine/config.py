"""What a caller chooses: the sizes and modes of an engine, and how a request is sampled."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from mamba_align_jax import _values as values
from mamba_align_jax._options import chosen, option
from mamba_align_jax.align.config import check_fold_length
from mamba_align_jax.align.policy import POLICIES as POLICIES
from mamba_align_jax.engine.grammar import Grammar

PREFIX_CACHE_MODES = ("none", "align", "all")
SPECULATIONS = ("prompt_lookup", "mtp")
STATE_DTYPES = ("float32", "bfloat16", "float16")
WINDOW_LAYOUTS, STATE_LAYOUTS = ("SD", "DS"), ("VK", "KV")
# The largest number of entries of `SamplingParams.logit_bias`, and of stop tokens that `min_tokens` forbids.
MAX_LOGIT_BIASES, MAX_FORBIDDEN_STOPS = 300, 64
# The longest n-gram that prompt lookup may look up. Each length is looked up by itself, in every step.
LONGEST_LOOKUP = 256
# The largest number of most likely tokens that a request may ask for.
MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The static choices of an engine.

    Fields that decide speed and memory may be left out, that is None. An engine then chooses them for its model and its
    device, and its `config` has what was chosen: see "What an engine chooses" in docs/scheduling.md. What is given stays.

    Attributes:
        prefix_cache: "align" keeps states at block boundaries where chunks of prompts end, "all" at every boundary, "none"
            keeps nothing between requests. With "all" hits are longer: see docs/scheduling.md. May be left out.
        policy: "copy_free" reads states where the last step left them, "pre_copy" copies them first, "deferred" writes one
            per group of tokens: see docs/scheduling.md. "deferred" is for models whose recurrent layers are gated delta
            nets or Mamba-2.
        fold_length: Number of tokens between the states that policy "deferred" writes; a divisor of `block_size`, and
            more than 2 * `num_speculative_tokens`.
        block_size: Number of tokens between state boundaries; a multiple of `kv_page_size`. May be left out.
        kv_page_size: Number of tokens of a KV page. May be left out.
        checkpoint_interval: A state of each request stays cached every so many tokens; a multiple of `block_size`. None
            keeps only the states that are likely to be used again: see docs/scheduling.md.
        num_state_blocks: Number of state blocks, NULL_BLOCK included; None sizes both pools from `memory_fraction`.
        num_kv_pages: Number of KV pages, the NULL page included; None sizes both pools from `memory_fraction`.
        memory_fraction: Share that both pools take of the device's free memory, after the weights and what a step needs for
            itself. If a device reports no free memory (a CPU), the pools hold four times `max_num_seqs` sequences of
            `max_model_len`.
        num_speculative_tokens: Largest number of draft tokens per request and step, K; 0 turns speculation off. A
            running request holds about K more state blocks, except under policy "deferred", and `block_size` must be at
            least K + 1.
        speculation: "prompt_lookup" drafts what followed the same tokens earlier in the request; "mtp" drafts with the
            model's own head, whose keys take one more layer of every page.
        async_stepping: If True, a step is dispatched before the tokens of the last one are read, so that the device
            never waits for the host. Drafts are then made on the device, and a running request holds one state block
            more, or a few if blocks are small. May be left out.
        prompt_lookup_max: Number of tokens of the longest n-gram that is looked up for drafts; at most 256.
        prompt_lookup_min: Number of tokens of the shortest one.
        max_model_len: Number of tokens of the longest sequence; None is the model's own limit.
        max_num_seqs: Number of requests that run at once. May be left out.
        max_num_batched_tokens: Number of prompt tokens of one step. May be left out.
        max_mixed_tokens: Number of prompt tokens of a step in which requests decode too, which wait for them. At most
            `max_num_batched_tokens`. If both are left out, it is the smaller one; if it alone is, both are equal.
        max_prefill_rows: Number of prompts that may have tokens in one step. Many short prompts start sooner with more
            of them; a step with prompts takes a little longer for each. With more than 8, delta-rule layers on Hopper GPUs
            take longer for a long prompt that is alone in a step. May be left out.
        max_waiting: Number of requests that may wait to run for the first time; None is no limit. Of one tenant at most half
            as many are taken while others wait, and what it had queued alone keeps nobody out.
        overtaking_limit: Number of later requests that may run before a request whose tenant has its turn, for each level of
            priority by which they are ahead of it; None lets every request of a lower priority number run first, however
            long others wait.
        state_dtype: Dtype of the recurrent states: "float32", "bfloat16" or "float16".
        window_layout: Layout of the pools of convolution windows: "SD", [window, channels], or "DS", [channels, window];
            None is the model's own, which is "SD" unless it was changed. See docs/kernels.md for when to take another.
        state_layout: Layout of the pools of the gated delta rule's states: "VK", [value_heads, value_dim, key_dim], or
            "KV", [value_heads, key_dim, value_dim]; None is the model's own, which is "VK" unless it was changed. Policy
            "deferred" takes "VK" only.
        checked: If True, each step's bookkeeping is verified on the host, for debugging: see `StepChecker`.
    """

    prefix_cache: str = chosen(
        '"align" keeps states at block boundaries where chunks of prompts end, "all" at every boundary, "none" keeps '
        "nothing between requests",
        PREFIX_CACHE_MODES,
    )
    policy: str = option(
        "copy_free",
        '"copy_free" reads states where the last step left them, "pre_copy" copies them first, "deferred" writes one per '
        "group of tokens",
        POLICIES,
    )
    fold_length: int = option(16, 'Number of tokens between the states that policy "deferred" writes')
    block_size: int = chosen("Number of tokens between state boundaries")
    kv_page_size: int = chosen("Number of tokens of a KV page")
    checkpoint_interval: int | None = option(None, "A state of each request stays cached every so many tokens")
    num_state_blocks: int | None = option(None, "Number of state blocks, NULL_BLOCK included")
    num_kv_pages: int | None = option(None, "Number of KV pages, the NULL page included")
    memory_fraction: float = 0.95
    num_speculative_tokens: int = option(0, "Largest number of draft tokens per request and step, K")
    speculation: str = option(
        "prompt_lookup",
        '"prompt_lookup" drafts what followed the same tokens earlier in the request; "mtp" drafts with the model\'s own '
        "head",
        SPECULATIONS,
    )
    async_stepping: bool = chosen(
        "A step is dispatched before the tokens of the last one are read, so that the device never waits for the host"
    )
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    max_model_len: int | None = option(None, "Number of tokens of the longest sequence")
    max_num_seqs: int = chosen("Number of requests that run at once")
    max_num_batched_tokens: int = chosen("Number of prompt tokens of one step")
    max_mixed_tokens: int = chosen("Number of prompt tokens of a step in which requests decode too")
    max_prefill_rows: int = chosen("Number of prompts that may have tokens in one step")
    max_waiting: int | None = option(None, "Number of requests that may wait to run for the first time")
    overtaking_limit: int | None = option(
        None,
        "Number of later requests that may run before a request whose tenant has its turn, for each level of priority by "
        "which they are ahead of it",
    )
    state_dtype: str = option(
        "float32", 'Dtype of the recurrent states: "float32", "bfloat16" or "float16"', STATE_DTYPES
    )
    window_layout: str | None = option(
        None,
        'Layout of the pools of convolution windows: "SD", [window, channels], or "DS", [channels, window]',
        WINDOW_LAYOUTS,
    )
    state_layout: str | None = option(
        None,
        'Layout of the pools of the gated delta rule\'s states: "VK", [value_heads, value_dim, key_dim], or "KV", '
        "[value_heads, key_dim, value_dim]",
        STATE_LAYOUTS,
    )
    checked: bool = False

    def __post_init__(self) -> None:
        self._check(values.optional_choice, "prefix_cache", PREFIX_CACHE_MODES)
        self._check(values.choice, "policy", POLICIES)
        self._check(values.choice, "speculation", SPECULATIONS)
        self._check(values.choice, "state_dtype", STATE_DTYPES)
        self._check(values.optional_choice, "window_layout", WINDOW_LAYOUTS)
        self._check(values.optional_choice, "state_layout", STATE_LAYOUTS)
        self._check(values.integer, "fold_length", 1)
        for name in ("block_size", "kv_page_size", "max_num_seqs", "max_num_batched_tokens", "max_mixed_tokens"):
            self._check(values.optional_integer, name, 1)
        self._check(values.optional_integer, "max_prefill_rows", 1)
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            self._check(values.integer, name, 1, LONGEST_LOOKUP)
        for name in ("num_state_blocks", "num_kv_pages", "max_model_len", "checkpoint_interval"):
            self._check(values.optional_integer, name, 1)
        for name in ("max_waiting", "overtaking_limit"):
            self._check(values.optional_integer, name, 1)
        self._check(values.integer, "num_speculative_tokens", 0)
        self._check(values.number, "memory_fraction", values.FLOAT32_MIN, 1, "in (0, 1]")
        if self.async_stepping is not None:
            self._check(values.flag, "async_stepping")
        self._check(values.flag, "checked")
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        values.require(longest >= shortest, "prompt_lookup_max", f"at least prompt_lookup_min = {shortest}", longest)
        self._check_blocks()
        self._check_tokens()

    def _check(self, check: Callable[..., Any], name: str, *limits: Any) -> None:
        """Checks a field, and replaces it by the plain value that the check returns."""
        object.__setattr__(self, name, check(name, getattr(self, name), *limits))

    def _check_blocks(self) -> None:
        size, page, interval = self.block_size, self.kv_page_size, self.checkpoint_interval
        has_boundaries = self.prefix_cache != "none"
        if has_boundaries and size is not None:
            window = self.num_speculative_tokens + 1
            values.require(size >= window, "block_size", f"at least num_speculative_tokens + 1 = {window}", size)
            is_multiple = page is None or size % page == 0
            values.require(is_multiple, "block_size", f"a multiple of kv_page_size = {page}", size)
        if self.policy == "deferred":
            size_of_fold = has_boundaries and size is not None and size
            check_fold_length("fold_length", self.fold_length, self.num_speculative_tokens, size_of_fold)
            wanted = "None or 'VK' under policy 'deferred'"
            values.require(self.state_layout != "KV", "state_layout", wanted, self.state_layout)
        is_multiple = interval is None or size is None or interval % size == 0
        values.require(is_multiple, "checkpoint_interval", f"None or a multiple of block_size = {size}", interval)

    def _check_tokens(self) -> None:
        mixed, tokens = self.max_mixed_tokens, self.max_num_batched_tokens
        if mixed is not None and tokens is not None:
            values.require(mixed <= tokens, "max_mixed_tokens", f"at most max_num_batched_tokens = {tokens}", mixed)

    @property
    def drafts_with_head(self) -> bool:
        """Whether the model's draft head runs in every step."""
        return self.speculation == "mtp" and self.num_speculative_tokens > 0

    @property
    def drafts_on_device(self) -> bool:
        """Whether drafts are made inside the step, unless the engine is given another drafter."""
        return self.num_speculative_tokens > 0 and (self.async_stepping or self.drafts_with_head)

    @property
    def steps_in_flight(self) -> int:
        """How many steps may be unread when another one is dispatched. See `Engine.steps_in_flight` for split models."""
        return int(bool(self.async_stepping))


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
        max_tokens: Largest number of tokens to generate. With 0 the request ends when its prompt has run.
        temperature: 0 always takes the most likely token.
        top_k: Only the k most likely tokens are drawn; 0 keeps all.
        top_p: Only the most likely tokens up to this probability are drawn.
        seed: Seed of the request's own random stream. Results do not depend on other requests.
        stop_token_ids: Tokens that end the request, besides the model's own end token. A stop token is one of the output's
            tokens, and its text is not part of the output's text.
        stop: Strings that end the request. The generated text ends before the first of them that is complete, and the
            tokens with the one that completes it. Needs an engine with a tokenizer.
        skip_special_tokens: Whether special tokens are left out of the generated text.
        ignore_eos: Whether the request goes on after the model's end token.
        min_tokens: The model's end tokens and `stop_token_ids` are not generated before this number of tokens, and no stop
            string ends the request.
        min_p: Only tokens that are at least `min_p` times as likely as the most likely token are drawn; 0 keeps all.
        repetition_penalty: Divides the positive logits of tokens that are in the prompt or were generated, and
            multiplies the negative ones; 1 changes nothing.
        presence_penalty: Is subtracted from the logits of tokens that were generated. In [-2, 2].
        frequency_penalty: Is subtracted from a token's logit for each time that it was generated. In [-2, 2].
        logit_bias: Is added to the logits of single tokens: a mapping from token id to bias, or pairs of them, at most
            300. Biases are in [-100, 100]. They are kept as a tuple of pairs.
        logprobs: If it is a number, the output has the log-probability of each generated token, and those of so many
            most likely tokens in its place, at most 20. They are those of the model's own logits.
        prompt_logprobs: The same for the tokens of the prompt. The request then computes its whole prompt, whatever is
            cached.
        grammar: What the generated text must match; None for anything. End tokens are generated where the grammar may
            end. Needs an engine with the tokenizer of a tokenizer.json and the extra `structured`.
        cache_salt: Requests share prefixes only if their salts are equal.
        checkpoint_at: Offsets into the prompt, for instance the end of a system prompt, whose states stay cached. They
            are rounded down to multiples of 64 tokens, or to `block_size` if its blocks are no multiples of 64; 0 and
            offsets after the prompt are dropped. `RequestOutput.checkpoint_at` has the positions that result.
        num_speculative_tokens: Largest number of draft tokens per step; None is the engine's, 0 turns speculation off.
            The generated tokens do not depend on it.
        priority: Requests with lower numbers run first and are preempted last. Those with equal numbers run tenant by
            tenant, and those of one tenant in the order of their arrival.
        tenant: Whose request it is. Tenants take turns: one request of each that waits runs, then the next one of each.
            While others wait, a tenant has at most half of `EngineConfig.max_waiting`.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    min_tokens: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Any = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    cache_salt: str = ""
    checkpoint_at: tuple[int, ...] = ()
    num_speculative_tokens: int | None = None
    priority: int = 0
    tenant: str = ""

    def __post_init__(self) -> None:
        checked = dict(
            max_tokens=values.integer("max_tokens", self.max_tokens, 0),
            temperature=values.number("temperature", self.temperature, 0, values.FLOAT32_MAX, "finite and at least 0"),
            top_k=values.integer("top_k", self.top_k, 0),
            # A smaller number would be 0 on the device.
            top_p=values.number("top_p", self.top_p, values.FLOAT32_MIN, 1, "in [2**-126, 1]"),
            seed=values.integer("seed", self.seed, 0),
            stop_token_ids=values.integers("stop_token_ids", self.stop_token_ids, ordered=False),
            stop=values.texts("stop", self.stop),
            skip_special_tokens=values.flag("skip_special_tokens", self.skip_special_tokens),
            ignore_eos=values.flag("ignore_eos", self.ignore_eos),
            min_tokens=values.integer("min_tokens", self.min_tokens, 0),
            min_p=values.number("min_p", self.min_p, 0, 1, "in [0, 1]"),
            repetition_penalty=values.number(
                "repetition_penalty",
                self.repetition_penalty,
                values.FLOAT32_MIN,
                values.FLOAT32_MAX,
                "finite and greater than 0",
            ),
            presence_penalty=values.number("presence_penalty", self.presence_penalty, -2, 2, "in [-2, 2]"),
            frequency_penalty=values.number("frequency_penalty", self.frequency_penalty, -2, 2, "in [-2, 2]"),
            logit_bias=_biases(self.logit_bias),
            logprobs=values.optional_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS),
            prompt_logprobs=values.optional_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS),
            cache_salt=values.text("cache_salt", self.cache_salt),
            checkpoint_at=values.integers("checkpoint_at", self.checkpoint_at, ordered=False),
            num_speculative_tokens=values.optional_integer("num_speculative_tokens", self.num_speculative_tokens, 0),
            priority=values.integer("priority", self.priority, maximum=None),
            tenant=values.text("tenant", self.tenant),
        )
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        is_grammar = self.grammar is None or isinstance(self.grammar, Grammar)
        values.require(is_grammar, "grammar", "a Grammar or None", self.grammar)
        if self.grammar is not None:
            # A grammar says where the text ends.
            values.require(not self.ignore_eos, "ignore_eos", "False if there is a grammar", self.ignore_eos)
            values.require(not self.min_tokens, "min_tokens", "0 if there is a grammar", self.min_tokens)
        values.require(self.min_tokens <= self.max_tokens, "min_tokens", "at most max_tokens", self.min_tokens)
        num_stops = len(self.stop_token_ids) if self.min_tokens else 0
        wanted = f"at most {MAX_FORBIDDEN_STOPS} tokens if there is min_tokens"
        values.require(num_stops <= MAX_FORBIDDEN_STOPS, "stop_token_ids", wanted, num_stops)

    @classmethod
    def from_generation_config(cls, path: str | Path, **fields: Any) -> Self:
        """Makes the parameters with which a model's authors sample from it.

        The engine never applies them by itself. Temperature, top_k, top_p, min_p, repetition_penalty and the largest
        number of tokens are taken from generation_config.json, as vLLM takes them. A field that the file lacks, or that it
        has as null, keeps its own default. Without `do_sample` the most likely tokens are taken. The model's end tokens
        hold for every request anyway.

        Args:
            path: A directory from Hugging Face, with a generation_config.json.
            **fields: Fields that replace those of the file.

        Raises:
            ValueError: the directory has no such file, or one of its fields has a wrong type or value.
        """
        from mamba_align_jax.models.config_files import read_do_sample, read_sampling_defaults

        # transformers draws with temperature 1 if the file has none.
        draws = read_do_sample(path)
        found = read_sampling_defaults(path)
        temperature = found.get("temperature", 1.0) if draws else 0.0
        return cls(**(found | {"temperature": temperature} | fields))


def _biases(pairs: Any) -> tuple[tuple[int, float], ...]:
    """Checks `SamplingParams.logit_bias`, and returns it as pairs of a token id and its bias."""
    name, wanted = "logit_bias", "a mapping from token ids to biases, or pairs of them"
    found = values.members(name, tuple(pairs.items()) if isinstance(pairs, Mapping) else pairs, wanted)
    values.require(len(found) <= MAX_LOGIT_BIASES, name, f"at most {MAX_LOGIT_BIASES} entries", len(found))
    for pair in found:
        values.require(isinstance(pair, tuple | list) and len(pair) == 2, name, wanted, pair)
    tokens = values.integers(name, [token for token, _ in found])
    values.require(len({*tokens}) == len(tokens), name, "entries with different token ids", tokens)
    return tuple(
        (token, values.number(name, bias, -100, 100, "biases in [-100, 100]"))
        for token, (_, bias) in zip(tokens, found, strict=True)
    )
