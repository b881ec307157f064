"""The steps of a request as a cache sees them: their counts, the hit on which it enters, what they write and leave."""

from collections import deque
from dataclasses import dataclass, field

from mamba_align_jax import _values as values
from mamba_align_jax.cache.block_pool import BlockPool
from mamba_align_jax.cache.checkpoints import Checkpoints
from mamba_align_jax.cache.hashing import HashChain, HashMemo

# The block from which a state is copied, and the one to which.
Copy = tuple[int, int]


@dataclass(frozen=True)
class Hit:
    """A cached prefix.

    Attributes:
        length: Its number of tokens.
        blocks: The (column, block) pairs that hold its state. If it ends inside a column, the request gets a copy of it.
        chain: The hashes by which it was looked up.
    """

    length: int
    blocks: tuple[tuple[int, int], ...] = ()
    chain: HashChain | None = field(default=None, compare=False, repr=False)


@dataclass(slots=True)
class Step:
    """A step whose result the host has not read.

    Attributes:
        num_tokens: Its tokens, drafts included.
        num_drafts: Its drafts.
        offered: True if `publish` was called for it.
        dispatched: True if `release` was called after it.
    """

    num_tokens: int
    num_drafts: int
    offered: bool = False
    dispatched: bool = False


@dataclass
class Holder:
    """What `StateBlockManager` knows of a request that holds blocks.

    Attributes:
        chain: The hashes of its tokens.
        committed: The tokens computed as far as the host has read results.
        keep: The boundaries that stay cached, or None for all.
        columns: The block of each column.
        in_flight: The steps whose results are unread, the oldest first.
        rolling: The key of the newest boundary, if that boundary is released when the request passes the next one.
        shares: False after a reset of the cache: the request's states must not become findable any more.
        newest: The last boundary that it has published, in tokens, or from which it entered; 0 for none.
        unfolded: A boundary that the request has passed and keeps, and whose state no dispatched step has written; 0 for
            none. Only policy "deferred" has such boundaries.
        load: The block of the hit inside a column with which the request enters, and its own block of that column, to
            which the state is copied before its first step; None after that.
        save: The request's block at the end of the newest step, and the block to which the state is copied after it, if
            that end is inside a column and the request keeps the state there; None after that, and for other steps.
    """

    chain: HashChain
    committed: int
    keep: Checkpoints | None
    columns: dict[int, int] = field(default_factory=dict)
    in_flight: deque[Step] = field(default_factory=deque)
    rolling: bytes | None = None
    shares: bool = True
    newest: int = 0
    unfolded: int = 0
    load: Copy | None = None
    save: Copy | None = None


def chain_of(chain: HashChain | None, block_size: int, salt: bytes, memo: HashMemo | None = None) -> HashChain:
    """Returns the chain that a caller has given, or else a new one.

    Raises:
        ValueError: `chain` is something else, or its blocks do not divide those of `block_size` tokens.
    """
    values.instance("lookup: chain", chain, HashChain, optional=True)
    if chain is not None and block_size % chain.block_size:
        raise ValueError(f"lookup: chain must have blocks that divide {block_size} tokens, got {chain.block_size}")
    return chain or HashChain(block_size, salt, memo)


def check_step(max_drafts: int, min_computed: int, max_computed: int, num_tokens: int, num_drafts: int) -> None:
    """Checks the counts of a step of at most `max_drafts` drafts: see `StateBlockManager.allocate`.

    Raises:
        ValueError: A count is no int of Python, or the counts are not those of a step.
    """
    if not (
        type(min_computed) is type(max_computed) is type(num_tokens) is type(num_drafts) is int
        and 0 <= min_computed <= max_computed <= values.INT32_MAX - num_tokens
        and 0 <= num_drafts <= max_drafts
        and num_drafts < num_tokens
    ):
        counts = dict(
            min_computed=min_computed, max_computed=max_computed, num_tokens=num_tokens, num_drafts=num_drafts
        )
        for name, count in counts.items():
            if type(count) is not int:
                got = f"{count!r} of type {type(count).__name__}"
                raise ValueError(f"allocate: {name} must be an int of Python, got {got}")
        raise ValueError(
            f"allocate: a step must have 0 <= min_computed <= max_computed and at most num_speculative_tokens = "
            f"{max_drafts} drafts, fewer than its tokens, got min_computed = {min_computed!r}, max_computed = "
            f"{max_computed!r}, num_tokens = {num_tokens!r} and num_drafts = {num_drafts!r}"
        )


def check_computed(record: Holder | None, min_computed: int, max_computed: int) -> None:
    """Checks that a step's counts of computed tokens cover what a request's earlier steps may have left.

    Raises:
        ValueError: They don't. A request that enters, whose record is None, may have any counts.
    """
    if record is None:
        return
    least = most = record.committed
    for step in record.in_flight:
        least, most = least + step.num_tokens - step.num_drafts, most + step.num_tokens
    if not min_computed <= least <= most <= max_computed:
        raise ValueError(
            f"allocate: a step after {least} to {most} computed tokens must have min_computed <= {least} and max_computed "
            f">= {most}, got {min_computed} and {max_computed}"
        )


def check_hit(hit: Hit | None, held: dict[int, int], pool: BlockPool, min_computed: int, max_computed: int) -> None:
    """Checks that a request enters after the tokens of its hit, and that the hit's blocks are still cached for them.

    Raises:
        ValueError: The request does not enter there, or a block is not cached any more, or for other tokens.
    """
    if hit is None or not held:
        return
    if not min_computed == max_computed == hit.length:
        raise ValueError(
            f"allocate: min_computed and max_computed must be hit.length = {hit.length} for a request that enters, got "
            f"{min_computed} and {max_computed}"
        )
    key = hit.chain.at((), hit.length) if hit.chain else None
    for block in held.values():
        found = pool.key_of(block)
        if found is None or key not in (None, found):
            raise ValueError(f"allocate: hit must be what lookup returns now, got {hit}")
