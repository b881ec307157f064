"""The engine: takes requests, runs steps, and returns what the requests generated."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, repeat
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from mamba_align_jax import _values as values
from mamba_align_jax.cache.hybrid import CachedPrefix, HybridCache
from mamba_align_jax.engine.config import EngineConfig, SamplingParams
from mamba_align_jax.engine.device.explanation import Explanation
from mamba_align_jax.engine.device.model_worker import ModelWorker
from mamba_align_jax.engine.drafting.protocols import DeviceDrafter, Drafter
from mamba_align_jax.engine.running.admission import params_for, seeded
from mamba_align_jax.engine.running.bundle import read_bundle
from mamba_align_jax.engine.running.cache_reports import Listener
from mamba_align_jax.engine.running.core import EngineCore
from mamba_align_jax.engine.running.trace import write_trace
from mamba_align_jax.engine.running.transfer import Transfer, check_tokens, read_file
from mamba_align_jax.engine.scheduling.buckets import programs_of
from mamba_align_jax.engine.scheduling.request import RequestOutput, RequestUpdate
from mamba_align_jax.engine.scheduling.scheduler import Scheduler
from mamba_align_jax.engine.scheduling.stats import EngineStats as EngineStats
from mamba_align_jax.engine.text.tokenizer import Tokenizer, load_tokenizer, token_ids
from mamba_align_jax.errors import FieldError
from mamba_align_jax.models import load_model
from mamba_align_jax.models.weights import WeightsDtype
from pallas_kernels.quantized import ActivationDtype


class Engine:
    """Continuous batching over one model, on one device or on several, with a prefix cache over states and keys.

    Every method may be called from any thread. One call at a time changes the engine, and the others wait for it: for the
    steps that it reads, for the compilation of a program, or until states are moved. A function that the engine calls, as
    a drafter, must not call it: that raises a RuntimeError.

    An exception ends only the requests on whose account it was raised. An interrupt, as a KeyboardInterrupt, ends none:
    those that ran are queued again. docs/errors.md says what happens in which case.

    Attributes:
        config: The engine's configuration, with what the engine has chosen where it was left out.
        model_config: The model's configuration.
        tokenizer: Turns text into token ids and back, for `generate`; None if there is none.
        align: How states are kept.
        sizes: Sizes of the pools, on one device.
        runner: Runs steps.
        steps_in_flight: How many steps may be dispatched while the result of an earlier one is unread.
        unread_steps: The steps that were dispatched and not read, the oldest first.
        core: All that changes, for other parts of this package.
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
            config: The engine's configuration. What it leaves out is chosen for the model and the device: see `explain`.
            drafter: Proposes draft tokens instead of the drafter that `config` asks for. Under asynchronous stepping,
                and with the model's draft head, drafts are made on the device, and it must be a `DeviceDrafter`.
            tokenizer: With one, `generate` takes and returns text besides token ids.
            mesh: Splits the model over the devices of the mesh's axis "tensor", as `shard_model` does. Sizes and bytes
                are then those of one device.

        Raises:
            ValueError: A pool is too small for one request, the sizes need more memory than there is, `max_model_len`
                exceeds the model's limit, the model lacks the draft head that `config` asks for or can't be split,
                `config` is of another type, `drafter` is no drafter, or it runs on the host where drafts are made on the
                device.
        """
        config = EngineConfig() if config is None else config
        values.require(isinstance(config, EngineConfig), "config", "EngineConfig or None", config)
        self._begin(ModelWorker(model, config, drafter, mesh), tokenizer)

    @classmethod
    def over(cls, worker: ModelWorker, tokenizer: Tokenizer | None = None) -> "Engine":
        """Makes an engine over a model that is on its devices already, as `mamba_align_jax.processes` does.

        Args:
            worker: The model and its pools. No other engine may use it.
            tokenizer: As for the engine itself.
        """
        engine = cls.__new__(cls)
        engine._begin(worker, tokenizer)
        return engine

    def _begin(self, worker: ModelWorker, tokenizer: Tokenizer | None) -> None:
        core = self.core = EngineCore(worker, tokenizer)
        self.config, self.model_config, self.tokenizer = core.config, core.model_config, core.tokenizer
        self.align, self.sizes, self.runner = core.align, core.sizes, core.runner
        self.steps_in_flight, self.unread_steps = core.steps_in_flight, core.unread_steps
        self._transfer = Transfer(core)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        dtype: str | None = None,
        weights_dtype: WeightsDtype = "bfloat16",
        activation_dtype: ActivationDtype | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> "Engine":
        """Makes an engine over a Hugging Face directory: config.json, safetensors and perhaps tokenizer.json.

        Args:
            path: The directory.
            config: As for the engine itself.
            dtype: The model's dtype; None keeps that of the files.
            weights_dtype: How weights lie in memory: "bfloat16", "file" or "fp8". See `load_model`.
            activation_dtype: To what products round the inputs of quantised weights. See `load_model`.
            progress: Called after each parameter with the number of parameters read so far and the number of all.

        Raises:
            ValueError: The architecture is unsupported, a tensor is missing or has a wrong shape, or an argument is of
                another type.
        """
        values.instance("path", path, str, Path)
        values.require(callable(progress), "progress", "a function", progress)
        dtypes: Any = dict(weights_dtype=weights_dtype, activation_dtype=activation_dtype)
        model = load_model(path, dtype, progress, **dtypes)
        return cls(model, config, tokenizer=load_tokenizer(path))

    def explain(self) -> Explanation:
        """Returns what the engine has chosen and why, and what fits. `print(engine.explain())` shows it as a table."""
        return self.core.explanation

    @property
    def cache(self) -> HybridCache:
        """Assigns blocks and pages to requests. After a failure it may be another one."""
        return self.core.cache

    @property
    def scheduler(self) -> Scheduler:
        """Plans steps. After a failure or an interrupt it is another one."""
        return self.core.scheduler

    @property
    def stats(self) -> EngineStats:
        """What the engine has counted since it was made."""
        return self.core.counters.snapshot()

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs, or has an output that `step` has not returned yet."""
        return bool(self.core.requests or self.core.outputs)

    def warmup(self, progress: Callable[[], None] = lambda: None, *, draws: bool = True, full: bool = False) -> float:
        """Compiles every program that requests can need, and runs each once on padding.

        Args:
            progress: Called after each program is compiled. If it raises, the others are not compiled.
            draws: Whether requests will draw tokens at random. If False, half of the programs are left out, and are
                compiled by the first step that needs them.
            full: Whether requests will change logits: see `Level`. If False, the programs for them are left out, and
                are compiled by the first step that needs them.

        Returns:
            Seconds that it took.

        Raises:
            ValueError: `progress` can't be called.
        """
        values.require(callable(progress), "progress", "a function", progress)
        begin = time.perf_counter()
        buckets = programs_of(self.runner.buckets, draws=draws, full=full)
        with contextlib.closing(self.runner.compile(buckets)) as programs:
            # The generator itself stands for its end.
            while self.core.alone(next, programs, programs) is not programs:
                progress()
        for bucket in buckets:
            self.core.alone(self.core.warm, bucket)
        return time.perf_counter() - begin

    @property
    def longest_sequence(self) -> int:
        """The number of tokens of the longest prompt with its answer, for which the pools have room."""
        return min(self.align.max_model_len, (self.sizes.kv_pages - 1) * self.config.kv_page_size)

    @property
    def num_programs(self) -> int:
        """The number of programs that `warmup` compiles by default."""
        return len(self.runner.buckets)

    def add_request(self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None) -> int:
        """Queues a request and returns its id. If anything is raised, the request is not queued.

        Args:
            prompt_token_ids: The prompt: a sequence of whole numbers, or an array of one axis.
            params: How the request is sampled; None takes the defaults.

        Raises:
            ValueError: The request can never run: it is no sequence of tokens, is empty, too long for the model or the
                pools, has tokens outside the vocabulary, wants more draft tokens than the engine makes, or has a
                grammar that llguidance doesn't take.
            QueueFullError: `max_waiting` requests wait already, or half as many of the tenant's while others wait.
        """
        return self.core.alone(self.core.add, *self.core.checked(prompt_token_ids, params), self.core.outputs)

    def abort(self, request_id: int) -> RequestOutput | None:
        """Ends a request at once and frees exactly its blocks.

        Returns:
            The output; None if the request has ended or is unknown. If this call is interrupted after the request has
            ended, `step` returns the output.
        """
        outbox: dict[int, RequestOutput] = {}
        try:
            self.core.alone(self.core.abort, values.integer("request_id", request_id, maximum=None), outbox)
            return outbox.get(request_id)
        except BaseException:
            self.core.outputs.update(outbox)
            raise

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix, for instance after the model's weights were replaced.

        Running requests keep the blocks that they hold, but what they have computed and will compute is never shared.
        """
        self.core.alone(self._reset_prefix_cache)

    def _reset_prefix_cache(self) -> None:
        # The weights may have been replaced.
        self._transfer.forget_weights()
        self.core.reset_prefix_cache()

    def on_cache_event(self, listener: Listener | None) -> None:
        """Tells a function from now on, in order, which pages and states the prefix cache stores and which it loses.

        The function is called with a tuple of `CacheEvent`s after each step or other call that changes the cache, by the
        thread that makes it, and must not call the engine. The events begin with `CacheCleared`: this call empties the
        cache, and queues running requests again. After a failure or an interrupt the events may begin again with
        `CacheCleared` and all that is cached. So what one gets by applying all events is what is cached. If the function
        raises, that is logged, and it is told nothing more.

        Args:
            listener: Replaces the function of an earlier call; None ends the reports.

        Raises:
            ValueError: `listener` can't be called.
        """
        values.require(listener is None or callable(listener), "listener", "a function or None", listener)
        self.core.alone(self.core.listen, listener)

    def cached_prefix(self, prompt_token_ids: Sequence[int], cache_salt: str = "") -> CachedPrefix:
        """Returns what is cached of a prompt, for people to look at. It counts and changes nothing.

        Args:
            prompt_token_ids: The prompt: a sequence of whole numbers, or an array of one axis.
            cache_salt: What is cached under this salt: see `SamplingParams`.

        Raises:
            ValueError: The prompt is no sequence of the model's tokens, or it is empty.
        """
        tokens = values.integers("prompt_token_ids", prompt_token_ids, 0, self.model_config.vocab_size - 1)
        if not tokens:
            raise FieldError("prompt_token_ids", "not be empty", must="must")
        salt = values.text("cache_salt", cache_salt).encode()
        return self.core.alone(lambda: self.core.cache.cached_prefix(tokens, salt))

    def export_prefix(self, tokens: Sequence[int], *, cache_salt: str = "") -> bytes:
        """Returns what is cached of a prefix as bytes, which `import_prefix` of another engine takes.

        They hold the states at all of its boundaries that are cached, the pages up to the last of these, their keys, and a
        checksum; neither the tokens nor the salt. If nothing is cached, they hold nothing. What the bytes mean does not
        depend on the number of devices.

        Args:
            tokens: The prefix: a sequence of whole numbers, or an array of one axis. A state after all of its tokens
                counts as well.
            cache_salt: What is cached under this salt: see `SamplingParams`.

        Raises:
            ValueError: The prefix is no sequence of the model's tokens, or `prefix_cache` is "none".
        """
        found = values.integers("tokens", tokens, 0, self.model_config.vocab_size - 1)
        salt = values.text("cache_salt", cache_salt).encode()
        self._check_cache()
        return self.core.alone(self._transfer.export_prefix, found, salt)

    def import_prefix(self, data: bytes, tokens: Sequence[int] | None = None, *, cache_salt: str = "") -> int:
        """Puts what `export_prefix` returned into the prefix cache, as if a request had computed it here.

        The states and pages are then cached under the salt with which they were exported, and held by no request. Those
        that were cached before stay as they are. Others are evicted as usual. If the pools can't hold the whole prefix,
        its longest beginning that fits is taken.

        Args:
            data: The bytes, from an engine with an equal model, `block_size`, `kv_page_size`, `state_dtype` and
                `num_speculative_tokens`. It may run on another number of devices. There is no signature, so they must
                come from an engine that you trust. A writable buffer may be used again when the call returns.
            tokens: Refuses bytes that are not of a beginning of these tokens; None takes any.
            cache_salt: With `tokens`, refuses bytes that were exported under another salt.

        Returns:
            How many of the prefix's tokens are cached now: a request that continues them starts from there.

        Raises:
            ValueError: The bytes are no bundle, are damaged or cut off, or are of another version, model, configuration,
                prefix or salt, or `prefix_cache` is "none". Nothing is changed.
        """
        self._check_cache()
        salt = values.text("cache_salt", cache_salt).encode()
        bundle, page_size = read_bundle("data", data, "prefix"), self.config.kv_page_size
        if tokens is not None:
            found = values.integers("tokens", tokens, 0, self.model_config.vocab_size - 1)
            check_tokens("data", bundle, page_size, found, salt)
        num_pages, _ = self.core.alone(self._transfer.admit, "data", bundle)
        return num_pages * page_size

    def save_cache(self, directory: str | Path) -> None:
        """Writes everything that is cached to a file in a directory, for `load_cache` after a restart.

        A file from before is replaced once the new one is complete. Prefixes of all salts are in it, so it is readable
        only for the user who runs the process.

        Raises:
            ValueError: `prefix_cache` is "none", or the directory is neither text nor a path.
            OSError: The file can't be written.
        """
        self._check_cache()
        self.core.alone(self._transfer.save, _directory(directory))

    def load_cache(self, directory: str | Path) -> int:
        """Puts what `save_cache` wrote into the prefix cache. If the pools are smaller, what was used last is taken.

        Returns:
            How many of the file's states are cached now.

        Raises:
            ValueError: The file is no such file, is damaged, or is of another version, model or configuration, or
                `prefix_cache` is "none". Nothing is changed.
            OSError: There is no file, or it can't be read.
        """
        self._check_cache()
        bundle = read_file(_directory(directory))
        _, num_states = self.core.alone(self._transfer.admit, str(directory), bundle)
        return num_states

    def _check_cache(self) -> None:
        mode = self.config.prefix_cache
        values.require(mode != "none", "prefix_cache", "'align' or 'all' to move what is cached", mode)

    @contextlib.contextmanager
    def trace(self, path: str | Path) -> Iterator[None]:
        """Writes each step whose result is read in this context to a file: see `TracedStep` and `mamba-align trace`.

        If a step can't be written, that is logged, and the trace ends there. Another one may then begin.

        Raises:
            ValueError: A trace is being written already, or `path` is neither text nor a path.
            OSError: The file can't be created.
        """
        values.instance("path", path, str, Path)
        # Before the other trace's file is replaced, and again when no other thread can begin one.
        tracing = self.core.tracing
        tracing.check(path)
        with write_trace(path) as write:
            try:
                self.core.alone(tracing.begin, path, write)
                yield
            finally:
                self.core.alone(tracing.end, write)

    def step(self) -> list[RequestOutput]:
        """Dispatches one step, reads the oldest unread one, and returns the outputs of the requests that ended.

        Under asynchronous stepping the step that is read was dispatched `steps_in_flight` calls ago, unless no step could be
        dispatched. The first calls read nothing.

        If an exception is raised while one request is planned, drafted for or finished, that request ends with
        `finish_reason` "error", and if the device's step raises, the requests in it do. The others go on. What is cached
        stays unless the pools are lost: then all requests that ran end. If what was raised is not an Exception, for
        instance a KeyboardInterrupt, no request ends, and it is raised again. Outputs are then returned by the next call.
        """
        self.core.alone(self.core.advance)
        outputs = self.core.outputs
        # In one expression, so that an interrupt comes either before an output is taken or after all are returned.
        return [*filter(None, map(outputs.pop, tuple(outputs), repeat(None)))]

    def step_outputs(self) -> list[RequestUpdate]:
        """Does what `step` does, and returns what is new of every request: its new tokens, and its output if it ended.

        Requests of calls of `generate` are not among them. If this call is interrupted, the next one returns what this
        one would have returned: a list may therefore have two updates of one request, in their order.
        """
        last, outputs = self.core.alone(self.core.advance_and_update), self.core.outputs
        # In one expression, as in `step`. An output that another thread has taken meanwhile is not returned again.
        return [*self.core.updates.take(), *compress(last.values(), map(outputs.pop, last, repeat(None)))]

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        n: int = 1,
    ) -> list[RequestOutput]:
        """Runs one prompt or several to their ends.

        Other requests run at the same time, and `step` returns the outputs of those that end meanwhile. If anything is
        raised, all requests of this call are aborted.

        Args:
            prompts: One prompt or several; each is text or token ids, and token ids are a sequence or an array.
            params: How they are sampled: one for all, or one for each prompt; None takes the defaults.
            n: Number of outputs for each prompt. Their seeds are the seed of the prompt's `params` and those after it.

        Returns:
            The outputs in the order of the prompts, those of one prompt one after the other.

        Raises:
            ValueError: There is no prompt, one can never run, one is text and there is no tokenizer, or there are not as
                many `params` as prompts.
            QueueFullError: There are more prompts than may wait.
            Exception: The exception that ended one of the requests.
        """
        tokens = token_ids(self.tokenizer, prompts)
        requests = [
            self.core.checked(prompt, own)
            for prompt, one in zip(tokens, params_for(len(tokens), params), strict=True)
            for own in seeded(one, n)
        ]
        outputs: dict[int, RequestOutput] = {}
        try:
            ids = [self.core.alone(self.core.add, *request, outputs) for request in requests]
            while len(outputs) < len(ids):
                self.core.alone(self.core.advance)
        except BaseException:
            self.core.alone(self.core.abort_all, outputs)
            raise
        for output in outputs.values():
            if output.error is not None:
                raise output.error
        return [outputs[request_id] for request_id in ids]


def _directory(given: str | Path) -> Path:
    values.instance("directory", given, str, Path)
    return Path(given)
