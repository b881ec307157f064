"""What a caller chooses: the engine's sizes and modes, and how a request is sampled."""

from dataclasses import dataclass

from mamba_align_jax.align.policy import POLICIES

MODES = ("none", "align")
SPECULATIONS = ("prompt_lookup", "mtp")


def _require(condition: bool, name: str, wanted: str, got: object) -> None:
    if not condition:
        raise ValueError(f"{name} must be {wanted}, got {got!r}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Static choices of an engine.

    Attributes:
        prefix_cache: "align" keeps states at block boundaries, "none" keeps nothing between requests.
        policy: "copy_free" or "pre_copy": see `AlignConfig`.
        block_size: Tokens between state boundaries.
        kv_page_size: Tokens of a KV page; divides `block_size`.
        checkpoint_interval: Every so many tokens of each request a state stays cached, a multiple of `block_size`; None
            keeps only those that are likely to be wanted: see docs/design.md.
        num_state_blocks: State blocks, NULL_BLOCK included; None sizes both pools from `memory_fraction`.
        num_kv_pages: KV pages, the NULL page included; None likewise.
        memory_fraction: Share of the device's free memory for both pools. Where a device reports none (a CPU), the pools
            hold four times `max_num_seqs` sequences of `max_model_len`.
        num_speculative_tokens: Draft tokens per request and step at most, K; 0 drafts nothing. A running request holds about
            K state blocks more, and `block_size` must be at least K + 1.
        speculation: "prompt_lookup" drafts by prompt lookup, "mtp" by the model's own head, whose keys take one more layer of
            pages.
        async_stepping: Whether a step is dispatched before the last one's tokens are read, so that the device never waits
            for the host. Drafts are then made on the device; a running request holds a state block more, or a few.
        prompt_lookup_max: Longest n-gram that is looked up for drafts.
        prompt_lookup_min: Shortest one.
        max_model_len: Longest sequence; None is the model's own limit.
        max_num_seqs: Requests that run at once.
        max_num_batched_tokens: Prompt tokens of one step.
        max_waiting: Requests that may wait to run for the first time; None is no limit.
        state_dtype: Of the recurrent states: "float32", "bfloat16" or "float16".
        checked: Whether each step's bookkeeping is verified on the host, for debugging: see `StepChecker`.
    """

    prefix_cache: str = "align"
    policy: str = "copy_free"
    block_size: int = 64
    kv_page_size: int = 16
    checkpoint_interval: int | None = None
    num_state_blocks: int | None = None
    num_kv_pages: int | None = None
    memory_fraction: float = 0.8
    num_speculative_tokens: int = 0
    speculation: str = "prompt_lookup"
    async_stepping: bool = False
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    max_waiting: int | None = None
    state_dtype: str = "float32"
    checked: bool = False

    def __post_init__(self) -> None:
        _require(self.prefix_cache in (*MODES, "all"), "prefix_cache", f"one of {MODES}", self.prefix_cache)
        _require(self.policy in POLICIES, "policy", f"one of {tuple(POLICIES)}", self.policy)
        for name in ("block_size", "kv_page_size", "max_num_seqs", "max_num_batched_tokens"):
            _require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("num_state_blocks", "num_kv_pages", "max_model_len", "max_waiting"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, "None or at least 1", value)
        K = self.num_speculative_tokens
        _require(K >= 0, "num_speculative_tokens", "at least 0", K)
        _require(self.speculation in SPECULATIONS, "speculation", f"one of {SPECULATIONS}", self.speculation)
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        _require(low >= 1, "prompt_lookup_min", "at least 1", low)
        _require(high >= low, "prompt_lookup_max", f"at least prompt_lookup_min = {low}", high)
        if self.prefix_cache != "none":
            _require(
                self.block_size >= K + 1,
                "block_size",
                f"at least num_speculative_tokens + 1 = {K + 1}",
                self.block_size,
            )
            _require(
                self.block_size % self.kv_page_size == 0,
                "block_size",
                f"a multiple of kv_page_size = {self.kv_page_size}",
                self.block_size,
            )
        interval = self.checkpoint_interval
        _require(
            interval is None or (interval >= 1 and interval % self.block_size == 0),
            "checkpoint_interval",
            f"None or a multiple of block_size = {self.block_size}",
            interval,
        )
        _require(0 < self.memory_fraction <= 1, "memory_fraction", "in (0, 1]", self.memory_fraction)
        _require(
            self.state_dtype in ("float32", "bfloat16", "float16"),
            "state_dtype",
            "'float32', 'bfloat16' or 'float16'",
            self.state_dtype,
        )
        # The bookkeeping and the kernels have it; the engine's scheduler doesn't drive it yet.
        if self.prefix_cache == "all":
            raise ValueError("prefix_cache='all' is not available yet: use 'align'")

    @property
    def drafts_with_head(self) -> bool:
        """Whether the model's draft head runs in every step."""
        return self.speculation == "mtp" and self.num_speculative_tokens > 0

    @property
    def drafts_on_device(self) -> bool:
        """Whether drafts are made inside the step."""
        return self.num_speculative_tokens > 0 and (self.async_stepping or self.drafts_with_head)

    @property
    def steps_in_flight(self) -> int:
        """Steps that are unread when another one is dispatched."""
        return int(self.async_stepping)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
        max_tokens: Tokens to generate at most.
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the most likely tokens up to this probability.
        seed: Of the request's own random stream; results do not depend on other requests.
        stop_token_ids: Tokens that end the request, kept in its output, beside the model's own end token.
        ignore_eos: Whether to go on after the model's end token.
        cache_salt: Requests share prefixes only under equal salts.
        checkpoint_at: Offsets into the prompt, a system prompt's end for one, whose states stay cached: rounded down to
            `block_size`, without 0 and what the prompt doesn't reach. `RequestOutput.checkpoint_at` says what they came to.
        num_speculative_tokens: Draft tokens per step at most; None is the engine's, 0 drafts nothing. What is generated does
            not depend on it.
        priority: Lower numbers run first and give way last; equal ones in the order of their arrival.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    cache_salt: str = ""
    checkpoint_at: tuple[int, ...] = ()
    num_speculative_tokens: int | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "checkpoint_at", tuple(self.checkpoint_at))
        _require(self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        _require(self.temperature >= 0, "temperature", "at least 0", self.temperature)
        _require(self.top_k >= 0, "top_k", "at least 0", self.top_k)
        _require(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _require(0 <= self.seed < 2**31, "seed", "in [0, 2**31)", self.seed)
        _require(min(self.checkpoint_at, default=0) >= 0, "checkpoint_at", "offsets of at least 0", self.checkpoint_at)
        own = self.num_speculative_tokens
        _require(own is None or own >= 0, "num_speculative_tokens", "None or at least 0", own)
