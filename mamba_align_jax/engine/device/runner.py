"""Runs plans on the device: owns parameters, pools and programs, dispatches a step, and reads its result later."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np

from mamba_align_jax.align.checked import StepChecker
from mamba_align_jax.align.columns import NULL_BLOCK
from mamba_align_jax.align.config import AlignConfig
from mamba_align_jax.cache.steps import Copy
from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.device.command_thread import Answer, CommandThread
from mamba_align_jax.engine.device.device_inputs import DeviceInputs, new_mailboxes
from mamba_align_jax.engine.device.identity import weights_digest
from mamba_align_jax.engine.device.packed import Packed
from mamba_align_jax.engine.device.packing import Packer, page_entries
from mamba_align_jax.engine.device.page_tables import PageEntry, store_pages
from mamba_align_jax.engine.device.pending import store_tokens
from mamba_align_jax.engine.device.pool_entries import Forms, entry_bytes, forms_of, put_entries, take_entries
from mamba_align_jax.engine.device.program import DeviceState, Graph, StepResult, run_copies, run_fold, run_step
from mamba_align_jax.engine.device.read_step import ReadStep
from mamba_align_jax.engine.device.sizing import PoolSizes, pages_spec
from mamba_align_jax.engine.drafting.protocols import DeviceDrafter
from mamba_align_jax.engine.model import ServedModel, end_tokens
from mamba_align_jax.engine.sampling.adjust import SamplerState
from mamba_align_jax.engine.scheduling.buckets import Bucket, all_buckets, choose_bucket
from mamba_align_jax.engine.scheduling.levels import Level, changes_logits
from mamba_align_jax.engine.scheduling.scheduler import Plan, Row
from mamba_align_jax.sharding import Layout

R = TypeVar("R")
P = ParamSpec("P")


def _moves_data(command: Callable[P, R]) -> Callable[P, R]:
    """Lets a command send the host's arrays with its call, which is several times faster than `jax.device_put`.

    JAX's transfer guards, with which a host may look for transfers that nobody meant, count such an array as one. A result
    that is on its way to the host counts as well.
    """

    @functools.wraps(command)
    def run(*arguments: P.args, **keywords: P.kwargs) -> R:
        with jax.transfer_guard_host_to_device("allow"), jax.transfer_guard_device_to_host("allow"):
            return command(*arguments, **keywords)

    return run


class Dispatched(NamedTuple):
    """A step that was dispatched and not read: the row in each place, and its result, a packed `StepResult`."""

    places: list[Row | None]
    result: Answer[Packed]


class StepRunner:
    """Owns what is on the device: parameters, pools and bookkeeping. It compiles one program per bucket.

    The methods `do_...` are its commands: all that changes what is on the device after the runner is made. Their
    arguments are plain values, so that several processes can run the same commands: see `mamba_align_jax.processes`.

    A runner that launches ahead runs its commands in a thread, so that the host plans the next step while a program is
    started on many devices. After a command that nobody waits for has failed there (`failure`), no other one is run until
    `reset`, because what it would work on may be lost. Whoever reads a step that was not launched gets the exception.

    Attributes:
        align: How states are kept.
        params: The model's parameters.
        packer: Packs rows into the inputs of a step.
        layout: How the arrays lie on several devices; None for one device.
        drafter: Proposes drafts inside the step; None if no drafter runs on the device.
    """

    def __init__(
        self,
        model: ServedModel,
        align: AlignConfig,
        sizes: PoolSizes,
        kv_page_size: int,
        max_prefill_rows: int,
        max_num_batched_tokens: int,
        max_mixed_tokens: int | None = None,
        *,
        drafter: DeviceDrafter | None = None,
        layout: Layout | None = None,
        launches_ahead: bool = False,
        copies_states: bool = False,
    ) -> None:
        """Makes a runner with fresh pools.

        Args:
            model: The model.
            align: How states are kept.
            sizes: Sizes of the pools.
            kv_page_size: Number of tokens of a KV page.
            max_prefill_rows: Number of prefill rows of a step.
            max_num_batched_tokens: Number of tokens of these rows.
            max_mixed_tokens: Their number in a step that has decode rows too; None is the same.
            drafter: Proposes drafts inside the step; None if no drafter runs on the device.
            layout: How the arrays lie, for a model that is split over devices; `align` and `sizes` are then those of one
                device.
            launches_ahead: Whether `dispatch` and what precedes a step return before the step is launched.
            copies_states: Whether plans may have states that are copied: those of requests that start inside a block.
        """
        self.align = align
        self.max_prefill_rows = max_prefill_rows
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_mixed_tokens = max_mixed_tokens or max_num_batched_tokens
        self._graph, self.params = Graph.split(model)
        self._vocab_size, self._ends = model.config.vocab_size, end_tokens(model.config)
        self._kv_spec = pages_spec(model, drafter)
        self._hidden_size = getattr(model.config, "hidden_size", 0)
        self._sizes, self._page_size = sizes, kv_page_size
        self.drafter, self.layout, self.copies_states = drafter, layout, copies_states
        self._thread = CommandThread(weakref.WeakMethod(self._wait_for_device)) if launches_ahead else None
        self._start()

    @property
    def device_state(self) -> DeviceState:
        """What the last step left. Every step donates it. Commands that were begun are run first."""
        self._settle()
        return self._device_state

    @device_state.setter
    def device_state(self, device_state: DeviceState) -> None:
        self._settle()
        self._device_state = device_state

    @property
    def sampler(self) -> SamplerState | None:
        """What the device knows of requests whose logits are changed; None before the first that needs level FULL.

        The steps with such requests donate it. Commands that were begun are run first.
        """
        self._settle()
        return self._sampler

    @property
    def failure(self) -> BaseException | None:
        """What the first command has raised that failed in the thread since the last `reset`.

        Commands that were begun are run first.
        """
        self._settle()
        return self._failure

    def is_current_thread(self) -> bool:
        """Whether the caller is a thread that runs commands for the engine."""
        return self._thread is not None and self._thread.is_current()

    def _wait_for_device(self) -> None:
        with contextlib.suppress(Exception):
            jax.block_until_ready((self._device_state, self._sampler))

    def is_intact(self) -> bool:
        """Waits for the device, and returns whether pools and bookkeeping exist, whatever an earlier call has left.

        They don't if a step has taken them and has not left new ones, or if a step has failed, in the thread or on the
        device.
        """
        arrays = jax.tree.leaves((self.device_state, self.sampler))
        try:
            jax.block_until_ready(arrays)
        except Exception:
            return False
        return self._is_sound and self._failure is None and not any(array.is_deleted() for array in arrays)

    def run_command(self, command: Callable[..., R], *arguments: Any) -> R:
        """Runs one of the methods `do_...`. With several processes, all of them run it."""
        return self._in_thread(command, *arguments)

    def _in_thread(self, call: Callable[..., R], *arguments: Any) -> R:
        """Makes a call and waits for it, in the runner's thread if there is one."""
        return call(*arguments) if self._thread is None else self._thread.run(call, *arguments)

    def _begin(self, command: Callable[..., R], *arguments: Any) -> Answer[R]:
        """Runs one of the methods `do_...` like `run_command`, but a runner that launches ahead does not wait for it."""
        if self._thread is None:
            return Answer.of(lambda: self.run_command(command, *arguments))
        return self._thread.start(self._run_unless_failed, command, arguments)

    def _run_unless_failed(self, command: Callable[..., R], arguments: Sequence[Any]) -> R:
        if self._failure is not None:
            raise self._failure
        try:
            return command(*arguments)
        except BaseException as error:
            self._failure = error
            raise

    def _settle(self) -> None:
        """Waits until all commands that were begun have been run."""
        self._in_thread(lambda: None)

    def reset(self) -> None:
        """Replaces pools and bookkeeping by fresh ones, whatever a step that raised has left."""
        self.run_command(self.do_reset)

    def do_reset(self) -> None:
        """Command: see `reset`."""
        self._is_sound = False
        # The old arrays go first, because there is no room for both. An exception's traceback may refer to them.
        for array in jax.tree.leaves((self._device_state, self._sampler)):
            array.delete()
        self._start()

    def _start(self) -> None:
        align, sizes = self.align, self._sizes
        history = align.max_model_len if self.drafter else 0
        self._device_state = DeviceState.create(
            align,
            self._kv_spec,
            state_blocks=sizes.state_blocks,
            kv_pages=sizes.kv_pages,
            page_size=self._page_size,
            history=history,
            layout=self.layout,
        )
        self._sampler: SamplerState | None = None
        self._inputs = DeviceInputs(self.layout)
        # Old mailboxes stay until the new ones are there: a step that has failed may still write into them.
        self.mailboxes = new_mailboxes(self.layout, self._hidden_size)
        self.packer = Packer(align, self._page_size, history > 0, self._vocab_size)
        self._checker = StepChecker(align, sizes.state_blocks)
        # What the first command has raised that failed in the thread.
        self._failure: BaseException | None = None
        # False while the device's state, or the checker's account of it, may be half changed.
        self._is_sound = True

    def wrote(self, block: int) -> None:
        """Records that something other than a step filled a state block, for `checked` configurations."""
        for group in range(len(self.align.groups)):
            self._checker.wrote(group, block)

    @property
    def entry_forms(self) -> dict[str, Forms]:
        """The forms of the arrays of "pages" and of "states"."""
        pages, states = forms_of(self.align, self.device_state, self.layout)
        return {"pages": pages, "states": states}

    def take_entries(self, kind: str, ids: Sequence[int]) -> jax.Array:
        """Starts reading the bytes of pages or state blocks: see `pool_entries.take_entries`."""
        return self.run_command(self.do_take_entries, kind, list(ids))

    @_moves_data
    def do_take_entries(self, kind: str, ids: Sequence[int]) -> jax.Array:
        """Command: see `take_entries`."""
        return take_entries(self.device_state, self.entry_forms[kind], kind, ids)

    def put_entries(self, kind: str, ids: Sequence[int], entries: np.ndarray) -> None:
        """Replaces pages or state blocks by `entries`, uint8 [entries, bytes]: see `pool_entries.put_entries`."""
        flat = entries.reshape(-1)
        words = np.pad(flat, (0, -flat.size % 4)) if flat.size % 4 else flat
        self.run_command(self.do_put_entries, kind, list(ids), words.view(np.int32))

    @_moves_data
    def do_put_entries(self, kind: str, ids: Sequence[int], words: np.ndarray) -> None:
        """Command: see `put_entries`. `words` are the bytes of the entries, int32 [words]."""
        forms = self.entry_forms[kind]
        entries = words.view(np.uint8)[: len(ids) * entry_bytes(forms)].reshape(len(ids), -1)
        self.device_state = put_entries(self.device_state, forms, kind, ids, entries)

    def digest_weights(self) -> bytes:
        """Returns a digest of the parameters: see `weights_digest`."""
        return self.run_command(self.do_digest_weights)

    def do_digest_weights(self) -> bytes:
        """Command: see `digest_weights`."""
        return weights_digest(self.params, self.layout)

    def make_sampler(self) -> None:
        """Makes `sampler` unless it exists."""
        if self._sampler is None:
            self.run_command(self.do_make_sampler)

    @_moves_data
    def do_make_sampler(self) -> None:
        """Command: makes a new `sampler`."""
        self._sampler = SamplerState.create(self.align.max_num_seqs, self._vocab_size, len(self._ends), self.layout)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The sizes of every program that a plan can need."""
        sizes = self.max_prefill_rows, self.max_num_batched_tokens, self.max_mixed_tokens
        return all_buckets(self.align.max_num_seqs, *sizes)

    def trace(self, bucket: Bucket) -> jax.stages.Traced:
        """Traces one program. If it is lowered and compiled, the first step that needs it finds it compiled."""
        if bucket.level >= Level.FULL:
            self.make_sampler()
        inputs = self.packer.packed(bucket, [None] * bucket.num_rows)
        # JAX keeps what it has traced by settings that a thread may have to itself, so the same thread traces and runs.
        return self._in_thread(self._trace, bucket, inputs)

    def _trace(self, bucket: Bucket, inputs: Packed) -> jax.stages.Traced:
        return run_step.trace(*self._arrays(bucket, inputs), **self._static(bucket))

    def _arrays(self, bucket: Bucket, inputs: Packed) -> tuple[Any, ...]:
        """Returns the arrays that a bucket's program takes."""
        sampler = self.sampler if bucket.level >= Level.FULL else None
        return self.params, self._inputs.send(inputs), self.device_state, sampler, self.mailboxes

    def compile(self, buckets: Sequence[Bucket]) -> Generator[None, None, None]:
        """Compiles the programs of `buckets`, and yields once after each.

        On a GPU several programs are compiled at a time: tracing holds Python's lock and compiling does not. XLA's
        compiler for CPUs has crashed in threads, so a CPU compiles one after the other.
        """
        if jax.default_backend() == "cpu":
            for bucket in buckets:
                self.trace(bucket).lower().compile()
                yield
            return
        pool = ThreadPoolExecutor()
        try:
            for program in as_completed([pool.submit(self.trace(bucket).lower().compile) for bucket in buckets]):
                program.result()
                yield
        finally:
            # A caller who does not want the rest waits only for the programs that have been begun.
            pool.shutdown(cancel_futures=True)

    def warm(self, bucket: Bucket) -> None:
        """Runs one program on padding rows, which change nothing, and waits for it."""
        self._store_pages([])
        if self.drafter:
            self._begin(self.do_store_tokens, 0, ())
        if self.align.is_deferred:
            self.fold(-1)
        if self.copies_states:
            self._begin(self.do_copy_states, [])
        jax.block_until_ready(self._run(bucket, [None] * bucket.num_rows).result())

    def fold(self, slot: int) -> None:
        """Starts the fold of a slot's complete fold group, after the steps that were dispatched: see `fold_slots`."""
        self._is_sound = not self.align.checked
        self._begin(self.do_fold, slot)
        self._checker.folded(slot)
        self._is_sound = True

    @_moves_data
    def do_fold(self, slot: int) -> None:
        """Command: see `fold`."""
        slots = np.array([slot], np.int32)
        self.device_state = run_fold(slots, self.device_state, align=self.align, layout=self.layout)

    def _copy_states(self, copies: Sequence[Copy]) -> None:
        """Starts copies of state blocks, after the steps that were dispatched."""
        if copies:
            self._begin(self.do_copy_states, list(copies))
            for copy in copies if self.align.checked else ():
                self._checker.copied(*copy)

    @_moves_data
    def do_copy_states(self, copies: Sequence[Copy]) -> None:
        """Command: copies states from the first block to the second one of each pair. No block is read and written."""
        padded = np.full((2, self.max_prefill_rows), NULL_BLOCK, np.int32)
        padded[:, : len(copies)] = np.asarray(copies, np.int32).reshape(-1, 2).T
        self.device_state = run_copies(*padded, self.device_state, align=self.align, layout=self.layout)

    def dispatch(self, plan: Plan) -> Dispatched:
        """Starts the step of a plan, without waiting for the device. `read` waits for the result."""
        bucket = choose_bucket(self.buckets, plan)
        places = bucket.places(plan)
        return Dispatched(places, self._run(bucket, places))

    def _run(self, bucket: Bucket, places: Sequence[Row | None]) -> Answer[Packed]:
        early = self.packer.early_rows(bucket, places)
        if early:
            self._store_pages(early)
        for row in places[bucket.decode_rows :] if self.drafter else ():
            if row is not None and row.enters and row.start:
                self._begin(self.do_store_tokens, row.slot, row.request.tokens[: row.start])
        for row in places[bucket.decode_rows :]:
            if row is not None and row.enters and changes_logits(row.request.params):
                self._store_request(row)
        if bucket.level >= Level.FULL:
            self.make_sampler()
        inputs = self.packer.packed(bucket, places, early)
        # A checker that has raised, or that was not told of a step, can't be used again.
        self._is_sound = not self.align.checked
        given_blocks = [row.allocation for row in places[bucket.decode_rows :] if row is not None]
        self._copy_states([blocks.load for blocks in given_blocks if blocks.load])
        result = self._begin(self.do_step, bucket, inputs)
        if self.align.checked:
            given, counts = inputs.unpack(), result.result().unpack().counts
            self._checker.check(given.updates, given.additions, given.batch, counts, self.device_state.state)
        self._copy_states([blocks.save for blocks in given_blocks if blocks.save])
        self._is_sound = True
        return result

    @_moves_data
    def do_step(self, bucket: Bucket, inputs: Packed) -> Packed:
        """Command: starts the step of a bucket's program over packed `Inputs`, and returns its packed result.

        The result is on its way to the host.
        """
        result, self.device_state, after = run_step(*self._arrays(bucket, inputs), **self._static(bucket))
        if bucket.level >= Level.FULL:
            self._sampler = after
        result.words.copy_to_host_async()
        return result

    def _store_request(self, row: Row) -> None:
        self.make_sampler()
        request = row.request
        self._begin(self.do_store_request, row.slot, request.prompt, tuple(request.generated), request.params)

    @_moves_data
    def do_store_request(
        self, slot: int, prompt: Sequence[int], generated: Sequence[int], params: SamplingParams
    ) -> None:
        """Command: writes what `sampler` holds for the request that enters a slot."""
        assert self._sampler
        self._sampler = self._sampler.with_request(slot, prompt, generated, params, self._ends)

    def _store_pages(self, rows: Sequence[Row]) -> None:
        slots = [row.slot for row in rows if row.enters]
        self._begin(self.do_store_pages, slots, page_entries(rows))

    @_moves_data
    def do_store_pages(self, slots: Sequence[int], entries: Sequence[PageEntry]) -> None:
        """Command: clears the page tables of slots, and sets entries of them."""
        tables = store_pages(self.device_state.page_tables, slots, entries)
        self.device_state = replace(self.device_state, page_tables=tables)

    @_moves_data
    def do_store_tokens(self, slot: int, tokens: Sequence[int]) -> None:
        """Command: stores the first tokens of a slot's history."""
        pending = store_tokens(self.device_state.pending, slot, tokens)
        self.device_state = replace(self.device_state, pending=pending)

    def read(self, dispatched: Dispatched) -> ReadStep:
        """Waits for a step and returns its result. Nothing else of a step waits for the device."""
        packed = dispatched.result.result()
        result: StepResult = replace(packed, words=jax.device_get(packed.words)).unpack()
        return ReadStep.of(result, dispatched.places, self.align)

    def _static(self, bucket: Bucket) -> dict[str, Any]:
        """Returns the static arguments of a bucket's program."""
        model = dict(graph=self._graph, drafter=self.drafter, layout=self.layout)
        return dict(align=self.align, num_decode_rows=bucket.decode_rows, **model)
