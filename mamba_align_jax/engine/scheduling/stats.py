"""What an engine counts: the counters that its parts report into, and the snapshot of them that a caller gets."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made.

    Attributes:
        steps: Steps whose results were read.
        admitted_requests: Requests that have run.
        hit_requests: Those of them that started from a cached prefix.
        finished_requests: Requests that ended at a stop token or at their maximum length.
        aborted_requests: Requests that were aborted, some of them before they ran.
        failed_requests: Requests that ended because a step raised.
        prompt_tokens: Tokens of the admitted prompts, each prompt counted once.
        cached_tokens: Prompt tokens that were not computed because the cache had them.
        prefill_tokens: Tokens computed by prefill rows. A preempted request's tokens are counted again.
        state_bytes_copied: Bytes of states that were copied between blocks. Policy "deferred" copies those that are kept
            inside blocks, and no others.
        preemptions: How often a request was preempted.
        evicted_state_blocks: State blocks that were evicted from the cache.
        evicted_kv_pages: KV pages that were evicted from the cache.
        null_reads: Rows whose state was lost. More than 0 is a bug, which `EngineConfig(checked=True)` locates.
        draft_tokens: `draft_tokens[t]` counts the verify rows that had a draft in place t.
        accepted_tokens: `accepted_tokens[t]` counts the verify rows whose draft in place t was accepted.
    """

    steps: int = 0
    admitted_requests: int = 0
    hit_requests: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    failed_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    state_bytes_copied: int = 0
    preemptions: int = 0
    evicted_state_blocks: int = 0
    evicted_kv_pages: int = 0
    null_reads: int = 0
    draft_tokens: tuple[int, ...] = ()
    accepted_tokens: tuple[int, ...] = ()


class Counters:
    """The counters of one engine, by the names of `EngineStats`.

    The engine owns them and gives them, or their methods, to the scheduler and the block pools. These are made anew
    after a step has raised, and go on counting where their predecessors stopped.
    """

    def __init__(self, num_speculative_tokens: int = 0) -> None:
        """Makes counters of 0 for verify rows with up to `num_speculative_tokens` drafts."""
        self._counts = {field.name: 0 for field in fields(EngineStats) if field.default == 0}
        self._draft_tokens = [0] * num_speculative_tokens
        self._accepted_tokens = [0] * num_speculative_tokens

    def __getitem__(self, name: str) -> int:
        """Returns a count by its name, one of those that are numbers."""
        return self._counts[name]

    def add(self, **counts: int) -> None:
        """Adds to counts by their names."""
        for name, number in counts.items():
            self._counts[name] += number

    def admit(self, num_tokens: int, num_cached: int) -> None:
        """Counts a request that runs for the first time: `num_cached` tokens of its prompt came from the cache."""
        self.add(admitted_requests=1, hit_requests=num_cached > 0, prompt_tokens=num_tokens, cached_tokens=num_cached)

    def end(self, finish_reason: str) -> None:
        """Counts a request that ended: see `RequestOutput.finish_reason`."""
        self.add(finished_requests=finish_reason in ("stop", "length"))
        self.add(aborted_requests=finish_reason == "abort", failed_requests=finish_reason == "error")

    def verify(self, num_drafts: int, num_accepted: int) -> None:
        """Counts a verify row's drafts, place by place."""
        for place in range(num_drafts):
            self._draft_tokens[place] += 1
            self._accepted_tokens[place] += place < num_accepted

    def evict_state_block(self) -> None:
        """Counts an evicted state block."""
        self.add(evicted_state_blocks=1)

    def evict_kv_page(self) -> None:
        """Counts an evicted KV page."""
        self.add(evicted_kv_pages=1)

    def snapshot(self) -> EngineStats:
        """Returns the counts as they are now."""
        drafts = tuple(self._draft_tokens), tuple(self._accepted_tokens)
        return EngineStats(**self._counts, draft_tokens=drafts[0], accepted_tokens=drafts[1])
