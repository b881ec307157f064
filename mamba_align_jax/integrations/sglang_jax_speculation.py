"""Speculative decoding in sglang-jax for models with recurrent states, which also works with its radix cache of states.

`install` adds an algorithm, "NGRAM", that needs no draft model: a drafter on the host proposes tokens, and one step of the
model verifies them. Each request has a slot for the state after each token of such a step. Which of them becomes the
request's own slot is decided after acceptance, on the host, by exchanging slot ids, so no state is copied for it.
docs/integrations.md says with which commit this was run, and names all that it changes in sglang-jax.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mamba_align_jax.engine.drafting import Drafter
from mamba_align_jax.engine.drafting.prompt_lookup import PromptLookupDrafter
from mamba_align_jax.integrations.request_drafts import Joined, RequestDrafts
from mamba_align_jax.integrations.sglang_jax import VerifySlots, backends, sgl_module

ALGORITHM = "NGRAM"
# sglang-jax's table of a request's pages has room for so many tokens of a step at the end of the longest context.
MAX_DRAFT_TOKENS = 8


class VerifyRow(NamedTuple):
    """A request in a step that verifies drafts.

    Attributes:
        request: sglang-jax's request.
        computed: The number of the request's tokens whose states exist before the step.
        tokens: The last certain token and the drafts after it.
        boundary: The first boundary after `computed` tokens. None without a radix cache of states.
    """

    request: Any
    computed: int
    tokens: list[int]
    boundary: int | None


def install(*, drafter: Drafter | None = None) -> None:
    """Makes sglang-jax accept `speculative_algorithm="NGRAM"` for models with gated delta nets or Kimi delta attention.

    Call it after `sglang_jax.install`, at the same place and once. `speculative_num_draft_tokens` is the number of
    tokens of a request in a step, of which the first is certain. Requests must be greedy, and the server must have
    `disable_overlap_schedule` and one data-parallel rank.

    Args:
        drafter: What proposes drafts. None selects prompt lookup.

    Raises:
        ImportError: if sglang-jax cannot be imported.
        ValueError: if this was called before.
    """
    arguments: Any = sgl_module("sgl_jax.srt.server_args").ServerArgs
    algorithms: Any = sgl_module("sgl_jax.srt.speculative.spec_info").SpeculativeAlgorithm
    workers: Any = sgl_module("sgl_jax.srt.speculative.dflash_worker")
    runner: Any = sgl_module("sgl_jax.srt.model_executor.model_runner_kv_cache_mixin").ModelRunnerKVCacheMixin
    batches: Any = sgl_module("sgl_jax.srt.managers.schedule_batch").ScheduleBatch
    outputs: Any = sgl_module("sgl_jax.srt.managers.scheduler_output_processor_mixin").SchedulerOutputProcessorMixin
    if isinstance(workers.DFlashWorker, functools.partial):
        raise ValueError("sglang_jax_speculation.install must be called once, and was called before")
    drafts = RequestDrafts(PromptLookupDrafter(4, 2) if drafter is None else drafter)
    arguments.__post_init__ = functools.partialmethod(_check_arguments, arguments.__post_init__)
    algorithms.from_string = staticmethod(functools.partial(_algorithm, algorithms.DFLASH, algorithms.from_string))
    workers.DFlashWorker = functools.partial(_worker, workers.DFlashWorker)
    runner._init_pools = functools.partialmethod(_init_pools, runner._init_pools)
    make = functools.partialmethod(_verify_batch, batches.get_spec_model_worker_batch, drafts)
    batches.get_spec_model_worker_batch = make
    process = functools.partialmethod(_process_decode, outputs.process_batch_result_decode, drafts)
    outputs.process_batch_result_decode = process


def _check_arguments(args: Any, check: Callable) -> None:
    """Lets sglang-jax check a server's arguments without its rule that speculation excludes the extra buffer."""
    if (args.speculative_algorithm or "").upper() != ALGORITHM:
        return check(args)
    if args.dp_size != 1:
        raise ValueError(f"dp_size must be 1 with speculative_algorithm={ALGORITHM!r}, got {args.dp_size}")
    args.speculative_algorithm = None
    check(args)
    args.speculative_algorithm = ALGORITHM
    interval, num_tokens = args.recurrent_track_interval, args.speculative_num_draft_tokens
    if not 1 <= num_tokens <= MAX_DRAFT_TOKENS:
        raise ValueError(
            f"speculative_num_draft_tokens must be 1 to {MAX_DRAFT_TOKENS} with speculative_algorithm={ALGORITHM!r}, "
            f"got {num_tokens}"
        )
    if args.enable_recurrent_extra_buffer and interval < num_tokens:
        raise ValueError(
            f"speculative_num_draft_tokens must be at most recurrent_track_interval, got {num_tokens} and {interval}"
        )


def _algorithm(dflash: Any, from_string: Callable, name: str | None) -> Any:
    """Maps the name of an algorithm to sglang-jax's enumeration.

    "NGRAM" is scheduled as DFLASH is, the one algorithm of which the scheduler wants no draft state but lengths.
    """
    return dflash if (name or "").upper() == ALGORITHM else from_string(name)


def _worker(dflash_worker: type, server_args: Any, target_worker: Any) -> Any:
    """Makes the worker that sglang-jax's scheduler asks for each batch."""
    if server_args.speculative_algorithm != ALGORITHM:
        return dflash_worker(server_args, target_worker)
    return NGramWorker(server_args, target_worker)


def _init_pools(runner: Any, init_pools: Callable, num_places: int, dp_size: int) -> None:
    """Makes a model runner's pools, with slots for draft tokens besides the server's `max_recurrent_state_size`."""
    args = runner.server_args
    if args.speculative_algorithm != ALGORITHM:
        return init_pools(runner, num_places, dp_size)
    if runner.linear_recurrent_config is None:
        raise ValueError(f"speculative_algorithm={ALGORITHM!r} needs a model with recurrent states")
    slots, num_tokens = args.max_recurrent_state_size, args.speculative_num_draft_tokens
    args.max_recurrent_state_size = slots + num_places * (num_tokens + 1)
    init_pools(runner, num_places, dp_size)
    args.max_recurrent_state_size = slots
    runner.req_to_token_pool = _pool_class(type(runner.req_to_token_pool))(runner.req_to_token_pool, num_tokens)


@functools.cache
def _pool_class(base: type) -> type:
    class DraftSlotsPool(base):
        """sglang-jax's pool of requests, in which each request also has slots for the tokens of a verify step.

        Attributes:
            draft_slots: For each place of a request, a slot per token of a step, and one for a boundary.
        """

        def __init__(self, pool: Any, num_tokens: int) -> None:
            """Takes a pool that has slots for all places' tokens and boundaries besides those that are given out."""
            self.__dict__.update(vars(pool))
            self.slots_per_rank -= self.size * (num_tokens + 1)
            self.draft_slots = np.zeros((self.size, num_tokens + 1), np.int32)
            self._give_slots()

        def _give_slots(self) -> None:
            first = self.slots_per_rank + 1
            self.recurrent_free_slots = [list(range(1, first))]
            self.draft_slots[:] = np.arange(first, first + self.draft_slots.size).reshape(self.draft_slots.shape)

        def clear(self) -> None:
            """Takes back all slots."""
            super().clear()
            self._give_slots()

        def slots(self, rows: list[VerifyRow], num_rows: int) -> VerifySlots:
            """Returns the slots that a step of these rows writes, with padding rows up to `num_rows`."""
            token = np.zeros((num_rows, self.draft_slots.shape[1] - 1), np.int32)
            kept, source = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
            for i, row in enumerate(rows):
                slots = self.draft_slots[row.request.req_pool_idx]
                token[i] = slots[:-1]
                if row.boundary is not None and row.boundary <= row.computed + len(row.tokens):
                    kept[i], source[i] = slots[-1], slots[row.boundary - row.computed - 1]
            return VerifySlots(token, kept, source)

        def accept(self, row: VerifyRow, num_accepted: int) -> None:
            """Makes the slot of the last accepted token the request's own, and keeps that of a boundary it has passed."""
            request, slots = row.request, self.draft_slots[row.request.req_pool_idx]
            own, slots[num_accepted - 1] = int(slots[num_accepted - 1]), request.recurrent_pool_idx
            request.recurrent_pool_idx = own
            self.req_index_to_recurrent_index_mapping[request.req_pool_idx] = own
            if row.boundary is None or row.boundary > row.computed + num_accepted:
                return
            place = request.recurrent_next_track_idx
            kept, slots[-1] = int(slots[-1]), request.recurrent_ping_pong_track_buffer[place]
            self.set_recurrent_ping_pong_slot(request, place, kept)
            request.recurrent_last_track_seqlen = row.boundary
            request.recurrent_next_track_idx = self.get_recurrent_ping_pong_other_idx(place)

    return DraftSlotsPool


def _verify_batch(
    batch: Any,
    get_batch: Callable,
    drafts: RequestDrafts,
    token_paddings: list[int],
    bs_paddings: list[int],
    cache_loc_paddings: list[int],
    page_size: int,
    enable_static_lora: bool = False,
    draft_token_num: int = 1,
) -> Any:
    """Makes the step that verifies the drafts of a batch's requests, as a prompt step of their tokens."""
    paddings = token_paddings, bs_paddings, cache_loc_paddings, page_size, enable_static_lora
    pool, (info,) = batch.req_to_token_pool, batch.reqs_info
    if not hasattr(pool, "draft_slots"):
        return get_batch(batch, *paddings, draft_token_num)
    interval = batch.tree_cache.recurrent_track_interval if pool.enable_recurrent_extra_buffer else None
    rows = [_row(request, drafts, draft_token_num, interval) for request in info.reqs]
    modes: Any = sgl_module("sgl_jax.srt.model_executor.forward_batch_info")
    info, step = copy.copy(info), copy.copy(batch)
    info.prefix_lens, info.extend_lens = [row.computed for row in rows], [len(row.tokens) for row in rows]
    info.seq_lens = np.add(info.prefix_lens, info.extend_lens, dtype=np.int32)
    info.input_ids = np.concatenate([np.asarray(row.tokens, np.int32) for row in rows])
    places = [(row.request.req_pool_idx, row.computed, len(row.tokens)) for row in rows]
    info.out_cache_loc = np.concatenate([pool.req_to_token[i, begin : begin + size] for i, begin, size in places])
    info.recurrent_indices = pool.get_linear_recurrent_indices(info.req_pool_indices)
    # The rest is left from the requests' prompts, or asks for copies that are made otherwise.
    info.extend_logprob_start_lens = info.recurrent_cow_src_indices = None
    info.recurrent_track_indices = info.recurrent_track_mask = None
    step.reqs_info, step.forward_mode = [info], modes.ForwardMode.EXTEND
    step = step.get_model_worker_batch(*paddings)
    batch.per_dp_bs_size = step.per_dp_bs_size
    step.capture_hidden_mode = modes.CaptureHiddenMode.NULL
    step.verify_rows, step.verify_slots = rows, pool.slots(rows, len(step.seq_lens))
    return step


def _row(request: Any, drafts: RequestDrafts, num_tokens: int, interval: int | None) -> VerifyRow:
    """Drafts for a request. The step yields no more tokens than the request still wants."""
    num_outputs = len(request.output_ids)
    computed = len(request.origin_input_ids) + num_outputs - 1
    most = min(num_tokens, request.sampling_params.max_new_tokens - num_outputs) - 1
    drafted = drafts.draft(request, most) if most > 0 else []
    boundary = None if interval is None else (computed // interval + 1) * interval
    return VerifyRow(request, computed, [request.output_ids[-1], *drafted], boundary)


class NGramWorker:
    """Runs the batches of sglang-jax's scheduler. It holds the target model's worker and has no model of its own."""

    def __init__(self, server_args: Any, target_worker: Any) -> None:
        """Keeps the worker of the model that verifies, whose linear-attention layers must run on this library's ops."""
        backend = getattr(target_worker.model_runner.attn_backend, "linear_attn_backend", None)
        if not isinstance(backend, backends(getattr(backend, "implementation", None))):
            raise ValueError(
                f"speculative_algorithm={ALGORITHM!r} needs the linear-attention backends that sglang_jax.install makes, "
                f"got {type(backend).__name__}"
            )
        num_tokens = server_args.speculative_num_draft_tokens
        needed, most = target_worker.max_running_requests * num_tokens, target_worker.max_padded_num_tokens
        if needed > most:
            raise ValueError(
                f"chunked_prefill_size and max_prefill_tokens must be at least {needed} for {num_tokens} tokens of each of "
                f"{target_worker.max_running_requests} running requests in a step, got {most}"
            )
        self.speculative_num_draft_tokens = num_tokens
        self.target_worker = target_worker

    def run_spec_decode_precompile(self) -> None:
        """Does nothing: programs are compiled when they are first needed."""

    def forward_batch_speculative_generation(self, batch: Any, launch_done: Any = None) -> Any:
        """Runs a prompt step or a verify step, and returns what its requests sampled."""
        modes: Any = sgl_module("sgl_jax.srt.model_executor.forward_batch_info")
        results: Any = sgl_module("sgl_jax.srt.managers.scheduler").GenerationBatchResult
        rows, size = getattr(batch, "verify_rows", None), len(batch.seq_lens)
        batch.capture_hidden_mode = modes.CaptureHiddenMode.NULL
        if rows is None:
            logits, tokens, misses = self.target_worker.forward_batch_generation(batch, sampling_metadata=None)
            tokens, accepted = np.asarray(tokens), None
            verified = tokens[batch.logits_indices_selector]
            lengths = np.asarray(batch.seq_lens)[batch.logits_indices_selector]
        else:
            runner = self.target_worker.model_runner
            batch.forward_batch = modes.ForwardBatch.init_new(batch, runner)
            metadata = runner.attn_backend.get_forward_metadata(batch)
            # Layers run the rows as prompts. Only the last product is that of a verify step: it has logits of all tokens.
            batch.forward_mode = modes.ForwardMode.TARGET_VERIFY
            logits, _, misses = self.target_worker.forward_batch_generation(
                batch, skip_sample=True, forward_metadata=metadata
            )
            sampled = np.asarray(jnp.argmax(logits.next_token_logits, axis=-1))
            tokens, accepted = self._accept(rows, sampled, size)
            real = accepted[: len(rows)]
            verified = tokens.reshape(size, -1)[np.arange(len(rows)), real - 1]
            lengths = np.asarray([row.computed for row in rows], np.int32) + real
        state = self._state(verified, lengths)
        state.new_seq_lens = np.zeros(size, np.int32)
        state.new_seq_lens[: len(lengths)] = lengths + 1
        return results(
            logits_output=logits, next_token_ids=tokens, next_draft_input=state, accept_lens=accepted, bid=batch.bid,
            cache_miss_count=misses, extend_input_len_per_req=None, extend_logprob_start_len_per_req=None,
        )  # fmt: skip

    def _accept(self, rows: list[VerifyRow], sampled: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Accepts each row's drafts up to the first that the model does not sample, and the token after them.

        Returns the accepted tokens [size * num_draft_tokens] and their numbers [size], with padding rows.
        """
        tokens = np.zeros((size, self.speculative_num_draft_tokens), np.int32)
        accepted, begin, pool = np.zeros(size, np.int32), 0, self.target_worker.model_runner.req_to_token_pool
        for i, row in enumerate(rows):
            choice = sampled[begin : begin + len(row.tokens)]
            begin += len(row.tokens)
            choice = choice[: 1 + int(np.cumprod(choice[:-1] == row.tokens[1:]).sum())].tolist()
            accepted[i] = number = _until_stop(row.request, choice)
            tokens[i, :number] = choice[:number]
            pool.accept(row, number)
        return tokens.reshape(-1), accepted

    def _state(self, verified: np.ndarray, lengths: np.ndarray) -> Any:
        """Returns what sglang-jax keeps of each request between steps: its last token and its number of computed ones."""
        inputs: Any = sgl_module("sgl_jax.srt.speculative.dflash_info").DFlashDraftInput
        return inputs(
            verified_id=verified.astype(np.int32), ctx_lens=np.zeros_like(lengths), draft_seq_lens=lengths,
            block_size=self.speculative_num_draft_tokens,
        )  # fmt: skip


def _until_stop(request: Any, tokens: list[int]) -> int:
    """Counts a request's new tokens up to its first stop token. Those after it would be cached with a longer prefix."""
    request = copy.copy(request)
    before, request.output_ids = len(request.output_ids), Joined(request.output_ids, tokens)
    return request.finished_len - before if request._check_token_based_finish(tokens) else len(tokens)


def _process_decode(
    scheduler: Any, process: Callable, drafts: RequestDrafts, batch: Any, result: Any, launch_done: Any = None
):
    """Processes what a step sampled, and lets a finished request cache all tokens that it accepted.

    sglang-jax counts a step's accepted tokens as computed only if the request goes on. What it caches of a finished
    request would be shorter than the boundary that was kept, so that the state would get the wrong prefix.
    """
    requests = [request for info in batch.reqs_info for request in info.reqs or []]
    if not hasattr(batch.req_to_token_pool, "draft_slots"):
        return process(scheduler, batch, result, launch_done)
    more = [int(accepted) - 1 for accepted in result.accept_lens[: len(requests)]]
    for request, count in zip(requests, more, strict=True):
        request.kv_committed_len += count
    process(scheduler, batch, result, launch_done)
    for request, count in zip(requests, more, strict=True):
        if request.finished():
            drafts.forget(request)
        else:
            request.kv_committed_len -= count
