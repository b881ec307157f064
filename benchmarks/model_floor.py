"""The floor of a model's step or prompt: the least time that its bytes and its operations take, by arithmetic.

Every matrix product takes the larger of its bytes at the copy rate and its operations at the rate of a large product, keys
and values are read once, and recurrent states are read once and written once for each token of a row. Under policy
"deferred" states are written once for each fold group of accepted tokens, and entries of rings are read and written. Of
experts, the chosen ones are read: `benchmarks.model` counts them in a step of decode and verify cases, and for prompts
there are as many as if tokens chose at random. Several devices share the work equally, and what they send is not counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mamba_align_jax.models.qwen3_5 import LINEAR, Config

FLOPS_PER_US = 790e6  # of a large bfloat16 product on one H200


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        kind: "decode", "verify", or "prompt" for the time to the first token.
        rows: Requests that run at once.
        context: Tokens of each prompt.
        drafts: Drafts of each row, in a verify case.
        draws: Whether the rows of a decode case draw their tokens.
    """

    kind: str
    rows: int
    context: int
    drafts: int = 0
    draws: bool = False

    @property
    def name(self) -> str:
        """The name in the rows of results."""
        if self.kind == "prompt":
            return f"prompt {self.context}"
        drafts, drawn = f" K{self.drafts}" if self.drafts else "", " drawn" if self.draws else ""
        return f"{self.kind}{drafts} {self.rows}x{self.context}{drawn}"

    @property
    def tokens(self) -> int:
        """The tokens of what is timed: a step, or a whole prompt."""
        return self.context if self.kind == "prompt" else self.rows * (1 + self.drafts)


@dataclass(frozen=True)
class Ring:
    """What decode and verify rows keep under policy "deferred".

    Attributes:
        fold_length: Tokens of a fold group.
        accepted: Tokens by which all rows together advance in a step.
        entry_bytes: Bytes of one entry in all layers.
    """

    fold_length: int
    accepted: float
    entry_bytes: float


def products(config: Config) -> Iterator[tuple[int, int]]:
    """The inputs and outputs of every matrix product of the layers that all tokens have. Routed experts are left out."""
    c = config
    keys, values = c.linear_num_key_heads * c.linear_key_head_dim, c.linear_num_value_heads * c.linear_value_head_dim
    heads, kv_heads = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    for layer, kind in enumerate(c.layer_types):
        if kind == LINEAR:
            yield c.hidden_size, 2 * keys + 2 * values + 2 * c.linear_num_value_heads
            yield values, c.hidden_size
        else:
            yield c.hidden_size, 2 * heads + 2 * kv_heads
            yield heads, c.hidden_size
        size = c.shared_expert_intermediate_size if c.is_sparse(layer) else c.intermediate_size
        yield c.hidden_size, 2 * size
        yield size, c.hidden_size
        if c.is_sparse(layer):
            yield c.hidden_size, c.num_experts
            yield c.hidden_size, 1


def expected_experts(config: Config, tokens: int) -> float:
    """The mean number of different experts that `tokens` tokens of one layer choose, if they choose at random."""
    return config.num_experts * (1 - (1 - config.num_experts_per_tok / config.num_experts) ** tokens)


def floor_us(
    config: Config,
    case: Case,
    copy_rate: float,
    itemsize: int = 2,
    *,
    experts: float | None = None,
    devices: int = 1,
    ring: Ring | None = None,
) -> float:
    """The least time of a case.

    Args:
        config: The model.
        case: A decode or verify case is one step after `context` tokens; a prompt case is a whole prompt.
        copy_rate: Bytes per microsecond that a copy moves, read and written.
        itemsize: Bytes of a weight, a key and a value.
        experts: The mean number of experts of a layer that are chosen; None expects them.
        devices: The number of devices that share the work.
        ring: What the rows keep under policy "deferred"; None under the others.
    """
    c, tokens = config, case.tokens
    product = lambda m, k, n: max(itemsize * k * n / copy_rate, 2.0 * m * k * n / FLOPS_PER_US)
    # A prompt and a decode row sample one token, a verify row one after each of its tokens.
    total = product(1 if case.kind == "prompt" else tokens, c.hidden_size, c.vocab_size)
    total += sum(product(tokens, k, n) for k, n in products(c))
    if c.num_experts:
        layers = sum(c.is_sparse(layer) for layer in range(c.num_hidden_layers))
        weights = 3 * c.hidden_size * c.moe_intermediate_size
        chosen = expected_experts(c, tokens) if experts is None else experts
        operations = 2.0 * tokens * c.num_experts_per_tok * weights
        total += layers * max(itemsize * chosen * weights / copy_rate, operations / FLOPS_PER_US)
    full = sum(kind != LINEAR for kind in c.layer_types)
    key_values = case.rows * case.context * full * 2 * c.num_key_value_heads * c.head_dim * itemsize
    state = (
        (c.num_hidden_layers - full) * c.linear_num_value_heads * c.linear_value_head_dim * c.linear_key_head_dim * 4
    )
    if case.kind == "prompt":
        # Two products of the queries with half of the positions each.
        total += 2.0 * full * c.num_attention_heads * c.head_dim * case.context**2 / FLOPS_PER_US
    else:
        written = tokens * state
        if ring is not None:
            # Rows are in every phase of their groups, so each reads half of a group's entries and one more.
            read = case.rows * (ring.fold_length + 1) / 2
            written = ring.accepted / ring.fold_length * state + (read + tokens) * ring.entry_bytes
        total += (key_values + case.rows * state + written) / copy_rate
    return total / devices
