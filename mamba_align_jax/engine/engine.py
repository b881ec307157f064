"""The engine: takes requests, runs steps, and returns what the requests generated."""

import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from mamba_align_jax._deprecated import renamed_keywords
from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.cache.state_blocks import StateBlockManager
from mamba_align_jax.engine.admission import check_request
from mamba_align_jax.engine.block_size_warning import BlockSizeWatch, warn_of_rounding
from mamba_align_jax.engine.config import EngineConfig, SamplingParams
from mamba_align_jax.engine.drafting.choose import choose_drafter
from mamba_align_jax.engine.drafting.protocols import DeviceDrafter, Drafter
from mamba_align_jax.engine.request import Request, RequestOutput
from mamba_align_jax.engine.results import count_row, is_first_admission, tokens_up_to_end
from mamba_align_jax.engine.runner import Dispatched, RowResult, StepRunner
from mamba_align_jax.engine.scheduler import Row, Scheduler
from mamba_align_jax.engine.sizing import PoolSizes, align_config, pool_sizes
from mamba_align_jax.engine.stats import Counters
from mamba_align_jax.engine.stats import EngineStats as EngineStats
from mamba_align_jax.engine.text import Tokenizer, load_tokenizer, token_ids, with_text
from mamba_align_jax.engine.trace import TracedStep, traced_row, write_trace
from mamba_align_jax.errors import OutOfBlocksError
from mamba_align_jax.models import load_model
from mamba_align_jax.models.tensor_parallel import shard_model, share

_LOG = logging.getLogger(__name__)


class Engine:
    """Continuous batching over one model, on one device or on several, with a prefix cache over states and keys.

    Attributes:
        config: The engine's configuration.
        model_config: The model's configuration.
        tokenizer: Turns text into token ids and back, for `generate`; None if there is none.
        spec: How states are kept.
        sizes: Sizes of the pools, on one device.
        cache: Assigns blocks and pages to requests.
        scheduler: Plans steps.
        runner: Runs them.
        unread_steps: The steps that were dispatched and not read, the oldest first.
    """

    def __init__(
        self,
        model: Any,
        config: EngineConfig | None = None,
        *,
        drafter: Drafter | DeviceDrafter | None = None,
        tokenizer: Tokenizer | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """Makes an engine over a loaded model.

        Args:
            model: A model as `load_model` returns it, or another `ServedModel`.
            config: The engine's configuration; None takes the defaults.
            drafter: Proposes draft tokens instead of the drafter that `config` asks for. Under asynchronous stepping,
                and with the model's draft head, drafts are made on the device, and it must be a `DeviceDrafter`.
            tokenizer: With one, `generate` takes and returns text besides token ids.
            mesh: Splits the model over the devices of the mesh's axis "tensor", as `shard_model` does. Sizes and bytes
                are then those of one device.

        Raises:
            ValueError: A pool is too small for one request, `max_model_len` exceeds the model's limit, the model lacks
                the draft head that `config` asks for or can't be split, or `drafter` runs on the host where drafts are
                made on the device.
        """
        config = config or EngineConfig()
        self.config, self.model_config, self.tokenizer = config, model.config, tokenizer
        layout, devices, own = None, (), model
        if mesh is not None:
            model, layout = shard_model(model, mesh)
            devices, own = mesh.local_devices, share(model)
        self.spec = align_config(config, own)
        self._watch = None
        if config.prefix_cache == "align":
            warn_of_rounding(config.block_size, [group.name for group in self.spec.groups])
            self._watch = BlockSizeWatch(config.block_size, self.spec.max_model_len)
        self._drafters = choose_drafter(config, model, drafter)
        self.sizes: PoolSizes = pool_sizes(self.spec, config, own, devices, drafter=self._drafters.device)
        self._counters = Counters.for_drafts(config.num_speculative_tokens)
        self._make_cache()
        self.runner = StepRunner(
            model,
            self.spec,
            self.sizes,
            config.kv_page_size,
            config.max_prefill_rows,
            config.max_num_batched_tokens,
            drafter=self._drafters.device,
            layout=layout,
        )
        self.unread_steps: deque[Dispatched] = deque()
        self._requests: dict[int, Request] = {}
        self._ids = itertools.count()
        # Outputs that `step` has not returned yet.
        self._outputs: list[RequestOutput] = []
        self._trace: Callable[[TracedStep], None] | None = None

    def _make_cache(self) -> None:
        """Makes an empty cache, and a scheduler over it. Both report into the engine's counters."""
        config, counters = self.config, self._counters
        self.cache = HybridCache(
            StateBlockManager(
                self.sizes.state_blocks,
                config.block_size,
                config.num_speculative_tokens,
                mode=config.prefix_cache,
                steps_in_flight=config.steps_in_flight,
                on_eviction=counters.evict_state_block,
            ),
            KVPageManager(self.sizes.kv_pages, config.kv_page_size, on_eviction=counters.evict_kv_page),
            checkpoint_interval=config.checkpoint_interval,
            check=config.checked,
        )
        self.scheduler = Scheduler(
            self.cache,
            config.max_num_seqs,
            config.max_prefill_rows,
            config.max_num_batched_tokens,
            self._drafters.host,
            config.num_speculative_tokens,
            config.max_waiting,
            counters=counters,
        )

    @classmethod
    @renamed_keywords(advance="progress")
    def from_pretrained(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        dtype: str | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> "Engine":
        """Makes an engine over a Hugging Face directory: config.json, safetensors and perhaps tokenizer.json.

        Args:
            path: The directory.
            config: The engine's configuration; None takes the defaults.
            dtype: The model's dtype; None keeps that of the files.
            progress: Called after each parameter with the number of parameters read so far and the number of all.

        Raises:
            ValueError: The architecture is unsupported, or a tensor is missing or has a wrong shape.
        """
        return cls(load_model(path, dtype, progress), config, tokenizer=load_tokenizer(path))

    @property
    def stats(self) -> EngineStats:
        """What the engine has counted since it was made."""
        return self._counters.snapshot()

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs, or has an output that `step` has not returned yet."""
        return bool(self._requests or self._outputs)

    @renamed_keywords(advance="progress")
    def warmup(self, progress: Callable[[], None] = lambda: None, *, draws: bool = True) -> float:
        """Compiles every program that requests can need, and runs each once on padding.

        Args:
            progress: Called after each program is compiled.
            draws: Whether requests will draw tokens at random. If False, half of the programs are left out, and are
                compiled by the first step that needs them.

        Returns:
            Seconds that it took.
        """
        begin = time.perf_counter()
        buckets = [bucket for bucket in self.runner.buckets if draws or not bucket.draws]
        for _ in self.runner.compile(buckets):
            progress()
        for bucket in buckets:
            self.runner.warm(bucket)
        return time.perf_counter() - begin

    @property
    def num_programs(self) -> int:
        """The number of all programs, which `warmup` compiles."""
        return len(self.runner.buckets)

    def add_request(self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None) -> int:
        """Queues a request and returns its id.

        Raises:
            ValueError: The request can never run: it is empty, too long for the model or the pools, has tokens outside
                the vocabulary, or wants more draft tokens than the engine makes.
            QueueFullError: `max_waiting` requests wait already. The request is not queued.
        """
        params = params or SamplingParams()
        prompt = tuple(int(t) for t in prompt_token_ids)
        check_request(
            prompt,
            params,
            config=self.config,
            cache=self.cache,
            vocab_size=self.model_config.vocab_size,
            max_model_len=self.spec.max_model_len,
        )
        request = Request(next(self._ids), prompt, params)
        self.scheduler.add(request)
        self._requests[request.id] = request
        return request.id

    def abort(self, request_id: int) -> RequestOutput | None:
        """Ends a request at once and frees exactly its blocks. Returns None if the request has ended or is unknown."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        self.scheduler.remove(request)
        self._counters.end("abort")
        return request.output("abort")

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix, for instance after the model's weights were replaced.

        Running requests keep the blocks that they hold, but what they have computed and will compute is never shared.
        """
        self.cache.reset_prefix_cache()

    @contextlib.contextmanager
    def trace(self, path: str | Path) -> Iterator[None]:
        """Writes each step whose result is read in this context to a file: see `TracedStep` and `mamba-align trace`.

        Raises:
            ValueError: A trace is being written already.
            OSError: The file can't be written.
        """
        if self._trace is not None:
            raise ValueError(f"trace: a trace is being written already, got {str(path)!r} for another one")
        with write_trace(path) as self._trace:
            try:
                yield
            finally:
                self._trace = None

    def step(self) -> list[RequestOutput]:
        """Dispatches one step, reads the oldest unread one, and returns the outputs of the requests that ended.

        Under asynchronous stepping the step that is read is the one before, unless no step could be dispatched.

        If a step raises, the contents of the pools are lost. The requests that ran end with `finish_reason` "error",
        the cache is emptied, and waiting requests are served by later steps. If what was raised is not an Exception,
        for instance a KeyboardInterrupt, it is raised again after that.

        Raises:
            OutOfBlocksError: Requests wait and none can run. The checks of `add_request` rule this out.
        """
        try:
            self._step()
        except OutOfBlocksError:
            raise
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        outputs, self._outputs = self._outputs, []
        return outputs

    def _step(self) -> None:
        plan = self.scheduler.schedule(settled=not self.unread_steps)
        if plan.rows:
            self.unread_steps.append(self.runner.dispatch(plan))
            self.scheduler.dispatched(plan)
        elif not self.unread_steps and self._requests:
            raise OutOfBlocksError(f"the pools can't run one of {len(self._requests)} requests: {self.sizes}")
        # A plan that is short of blocks waits for all results: they free blocks, or allow a preemption.
        max_unread = self.config.steps_in_flight if plan.rows and not plan.is_short else 0
        while len(self.unread_steps) > max_unread or (self.unread_steps and not self._requests):
            self._read(self.unread_steps.popleft())

    def _read(self, dispatched: Dispatched) -> None:
        """Reads a step's result. Rows whose request has ended since are dropped."""
        self._counters.steps += 1
        read = self.runner.read(dispatched)
        self._counters.state_bytes_copied += read.copied_bytes
        self._counters.null_reads += read.null_reads
        traced = []
        for row, result in read.rows:
            current = row.is_current
            if current:
                self._take_in(row, result)
            if self._trace:
                size = self.spec.state_block_size
                traced.append(traced_row(row, result.num_drafts, result.tokens, not current, size))
        if self._trace:
            self._trace(
                TracedStep(
                    step=self._counters.steps,
                    copied_bytes=read.copied_bytes,
                    null_reads=read.null_reads,
                    rows=tuple(traced),
                )
            )

    def _take_in(self, row: Row, result: RowResult) -> None:
        """Adds a row's result to its request, and ends the request if a token ends it."""
        request, eos = row.request, self.model_config.eos_token_id
        count_row(self._counters, row, result)
        if self._watch and is_first_admission(row):
            self._watch.admitted(len(request.prompt))
        tokens, reason = tokens_up_to_end(request, result.tokens, eos)
        self.scheduler.finished(row, tokens)
        if reason:
            self.scheduler.remove(request)
            self._end(request, reason)

    def _fail(self, error: BaseException) -> None:
        """Ends the requests that ran in a step that raised, and replaces cache, scheduler and pools by new ones."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        _LOG.error("a step failed, and with it %d requests", len(running), exc_info=error)
        for request in running:
            if self._drafters.host:
                self._drafters.host.forget(request.id)
            self._end(request, "error", error)
        self.unread_steps.clear()
        self._make_cache()
        self.scheduler.waiting = waiting
        self.runner.reset()

    def _end(self, request: Request, reason: str, error: BaseException | None = None) -> None:
        # An aborted request is gone already, and its caller has the output.
        if self._requests.pop(request.id, None) is not None:
            self._counters.end(reason)
            self._outputs.append(request.output(reason, error))

    def generate(
        self, prompts: str | Sequence[int] | Sequence[str | Sequence[int]], params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Runs one prompt or several to their ends.

        Other requests run at the same time, and `step` returns the outputs of those that end meanwhile. If anything is
        raised, all requests of this call are aborted.

        Args:
            prompts: One prompt or several; each is text or token ids.
            params: How they are sampled; None takes the defaults.

        Returns:
            The outputs in the order of the prompts.

        Raises:
            ValueError: A prompt can never run, or is text and there is no tokenizer.
            QueueFullError: There are more prompts than may wait.
            Exception: The exception of a step in which one of the prompts ran.
        """
        ids: list[int] = []
        outputs: dict[int, RequestOutput] = {}
        try:
            for prompt in token_ids(self.tokenizer, prompts):
                ids.append(self.add_request(prompt, params))
            while not outputs.keys() >= set(ids):
                outputs |= {output.request_id: output for output in self.step()}
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            raise
        finally:
            ended = [*outputs.values(), *self._outputs]
            self._outputs = [output for output in ended if output.request_id not in ids]
        outputs = {request_id: outputs[request_id] for request_id in ids}
        for output in outputs.values():
            if output.error is not None:
                raise output.error
        return [with_text(self.tokenizer, outputs[request_id]) for request_id in ids]
