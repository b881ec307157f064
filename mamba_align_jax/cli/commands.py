"""Runs the command line: `mamba-align demo | generate | chat | serve | info | trace | bench | env`.

A command imports what only it needs, so that the help comes without JAX.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mamba_align_jax import __version__
from mamba_align_jax import _values as values
from mamba_align_jax.cli import env
from mamba_align_jax.cli.hub import find_model
from mamba_align_jax.cli.options import Help, options_in
from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.engine.config import EngineConfig, SamplingParams
from mamba_align_jax.load import bench
from mamba_align_jax.load.bench import COMPARED_MODES
from mamba_align_jax.serve import command as serving

if TYPE_CHECKING:
    from mamba_align_jax.engine.running.engine import Engine

_CONSOLE = Console()
# What JAX's client gets of a GPU. The rest is the driver's, and what libraries take outside of JAX.
GPU_SHARE = 0.92
# JAX's own settings of the share. Whoever has set one keeps it.
_JAX_SETTINGS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")


@contextlib.contextmanager
def _loading() -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar on a terminal's stderr and removes it at the end. Yields the function that moves it.

    The function takes the number of parameters that are loaded and the number of all parameters.
    """
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("loading", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _load_model(options: argparse.Namespace, dtype: str | None, *, is_large: bool = False) -> Any:
    """Loads a model. A large one, which needs the memory of several devices, goes through that of the host."""
    import jax

    from mamba_align_jax.models import load_model

    place = jax.local_devices(backend="cpu")[0] if is_large else None
    with _loading() as loaded, jax.default_device(place):
        dtypes = {name: value for name, value in vars(options).items() if name in ("weights_dtype", "activation_dtype")}
        return load_model(options.model, dtype or _dtype_of_device(), loaded, **dtypes)


def _dtype_of_device() -> str | None:
    """The dtype of a model whose user names none. None is that of its files.

    XLA computes in float32 on a CPU, and it would convert whole pools of 16-bit floats, and back, whenever they are updated.
    """
    import jax

    return "float32" if jax.default_backend() == "cpu" else None


def _demo(options: argparse.Namespace) -> int:
    from mamba_align_jax.cli import demo
    from mamba_align_jax.engine.reference import Reference

    if options.json:
        Path(options.json).touch()  # a file that can't be written is refused at once
    # The bundled weights are bfloat16. They run in float32, so that rounding cannot hide a wrong state.
    model = _load_model(options, "float32")
    reference = Reference(model)
    results = []
    with Progress(console=_CONSOLE) as progress:
        for mode in COMPARED_MODES:
            task = progress.add_task(mode)

            def start(turns: int, task=task) -> Callable[[], None]:
                progress.update(task, total=turns)
                return lambda: progress.advance(task)

            engine = demo.make_engine(model, mode)
            result, count = demo.run_mode(engine, reference, mode, start)
            results.append(result)
    caption = "tokens; milliseconds; states copied"
    # Without lines between its columns the table fits in 80 characters.
    table = Table(title=f"{count} requests in every mode", caption=caption, box=None, padding=(0, 2, 0, 0))
    for heading in ("mode", "prompt", "cached", "computed", "TTFT", "TPOT", "copied", "right/ties"):
        table.add_column(heading, justify="left" if heading == "mode" else "right", no_wrap=True)
    for result in results:
        table.add_row(
            result.mode, str(result.prompt_tokens),
            f"{result.cached_tokens} {result.cached_tokens / result.prompt_tokens:.0%}", str(result.prefill_tokens),
            f"{result.ttft_ms:.1f}", f"{result.tpot_ms:.1f}", f"{result.state_bytes_copied / 1e6:.1f} MB",
            ("right" if result.identical else "[bold red]WRONG[/]") + f"/{result.ties}",
        )  # fmt: skip
    _CONSOLE.print(table)
    prompt, text = demo.sample(engine)
    _CONSOLE.print("The model continues the text after the mark:")
    _CONSOLE.print(f"{prompt}▮{text}", markup=False, highlight=False)
    if options.json:
        Path(options.json).write_text(demo.to_json(results))
    return 0 if all(result.identical for result in results) else 1


def _write(text: str) -> None:
    """Writes a piece of generated text as it is, and at once."""
    print(text, end="", flush=True)


def _generate(options: argparse.Namespace) -> int:
    from mamba_align_jax.cli.chat import stream
    from mamba_align_jax.engine.text.tokenizer import token_ids

    text = options.text if options.prompt is None else options.prompt
    if text is None:
        values.require(
            not sys.stdin.isatty(), "prompt", "given after the model, as --prompt or on standard input", None
        )
        text = sys.stdin.read().removesuffix("\n")
    params, n = _sampling(options), values.integer("--n", options.n, 1)
    engine = _load_engine(options)
    (prompt,) = token_ids(engine.tokenizer, text)
    for number in range(n):
        updates = stream(engine, prompt, replace(params, seed=params.seed + number))
        first = next(updates)  # nothing is written if the request is refused
        try:
            _write((f"--- {number + 1} of {n}\n" if n > 1 else "") + text + (first.text or ""))
            for update in updates:
                _write(update.text or "")
        finally:
            _write("\n")
    return 0


def _chat(options: argparse.Namespace) -> int:
    from mamba_align_jax.cli.chat import Conversation, talk
    from mamba_align_jax.engine.text.chat_template import load_chat_template

    template, engine = load_chat_template(options.model), _load_engine(options)
    tokenizer = engine.tokenizer
    if template is None or tokenizer is None:
        raise ValueError(
            f"--model must have tokenizer.json and a chat template, and the extra 'text' must be installed: got "
            f"{options.model}"
        )
    # The bundled model knows no end of a turn.
    params = _sampling(options)
    if options.model == BYTE_MODEL:
        params = replace(params, stop=(*params.stop, "\nuser:"))
    with _CONSOLE.status("compiling"):
        engine.generate(tokenizer.encode("a"), SamplingParams(max_tokens=2, temperature=options.temperature))
    talk(
        lambda: Conversation(engine, tokenizer, template, params, options.system),
        lambda: _CONSOLE.input("[bold]you:[/] "),
        _write,
        lambda line: _CONSOLE.print(line, style="dim", markup=False, highlight=False),
    )
    return 0


def _load_engine(options: argparse.Namespace) -> "Engine":
    from mamba_align_jax.engine.running.engine import Engine

    # One request at a time needs few programs.
    config = EngineConfig(max_num_seqs=1, max_prefill_rows=1)
    with _loading() as loaded:
        dtypes = {name: getattr(options, name) for name in ("dtype", "weights_dtype", "activation_dtype")}
        return Engine.from_pretrained(options.model, config, **dtypes, progress=loaded)


def _sampling(options: argparse.Namespace) -> SamplingParams:
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
    return SamplingParams(**{name: getattr(options, name) for name in names})


def _serve(options: argparse.Namespace) -> int:
    import jax

    from mamba_align_jax.engine.running.engine import Engine
    from mamba_align_jax.engine.text.tokenizer import load_tokenizer
    from mamba_align_jax.sharding import AXIS

    # These options take all that follows them.
    last = [names[-1] for names in (options.served_model_name, options.api_key) if names]
    if options.model == BYTE_MODEL and any(Path(name).is_dir() for name in last):
        raise ValueError("the model must stand before --served-model-name and --api-key, which take all that follows")
    if options.coordinator is not None:
        return _serve_together(options)
    for name in ("num_processes", "process_id", "local_device_ids"):
        given = getattr(options, name)
        values.require(given is None, name, "left out without --coordinator", given)

    size, devices, mesh = options.tensor_parallel_size, jax.devices(), None
    wanted = f"from 1 to {len(devices)}, the number of this host's devices"
    values.require(1 <= size <= len(devices), "tensor_parallel_size", wanted, size)
    if size > 1:
        mesh = jax.make_mesh((size,), (AXIS,), devices=devices[:size])

    def load(config: EngineConfig) -> Engine:
        model = _load_model(options, options.dtype, is_large=mesh is not None)
        return Engine(model, config, mesh=mesh, tokenizer=load_tokenizer(options.model))

    return serving.run(options, load)


def _serve_together(options: argparse.Namespace) -> int:
    """Serves as process 0 of several, or works for it as another one."""
    from mamba_align_jax.engine.text.tokenizer import load_tokenizer
    from mamba_align_jax.errors import ProcessLostError
    from mamba_align_jax.processes import EXIT_STATUS, Processes

    serving.make_settings(options)
    size = options.tensor_parallel_size
    values.require(size == 1, "tensor_parallel_size", "left out with --coordinator, which takes all devices", size)
    ids = options.num_processes, options.process_id
    try:
        together = Processes(options.coordinator, *ids, local_device_ids=options.local_device_ids)
    except RuntimeError as error:
        print(f"mamba-align: {error}", file=sys.stderr)
        return EXIT_STATUS
    with together as processes:
        model = _load_model(options, options.dtype, is_large=True)
        if not processes.is_leader:
            try:
                processes.follow(model)
            except ProcessLostError as lost:
                print(f"mamba-align: {lost}", file=sys.stderr)
                return EXIT_STATUS
            return 0
        tokenizer = load_tokenizer(options.model)
        return serving.run(options, lambda config: processes.lead(model, config, tokenizer=tokenizer))


def _info(options: argparse.Namespace) -> int:
    from mamba_align_jax.engine.device.defaults import complete, scratch_bytes
    from mamba_align_jax.engine.device.explanation import Explanation
    from mamba_align_jax.engine.device.model_facts import facts_of
    from mamba_align_jax.engine.device.sizing import DeviceMemory, align_config, pool_sizes
    from mamba_align_jax.engine.model import end_tokens
    from mamba_align_jax.models import outline_model
    from mamba_align_jax.models.config_files import read_sampling_defaults

    dtype = _dtype_of_device() if options.gpu_memory_gb is None else None
    model = outline_model(options.model, dtype, weights_dtype=options.weights_dtype)
    memory, facts = DeviceMemory.of(), facts_of(model)
    if options.gpu_memory_gb is not None:
        limit = int(options.gpu_memory_utilization * options.gpu_memory_gb * 1e9)
        memory = DeviceMemory(options.gpu, limit, limit)
    config, reasons = complete(serving.make_config(options), model, facts, memory)
    align, scratch = align_config(config, model), scratch_bytes(config, model, facts)
    sizes = pool_sizes(align, config, model, memory, reserved_bytes=scratch + facts.weight_bytes)
    explained = Explanation.of(config, reasons, align, sizes, memory, facts, scratch)
    sampling = read_sampling_defaults(options.model)
    of_model = {
        "architecture": model.config.model_type,
        "dtype": str(model.dtype),
        "weights_dtype": options.weights_dtype,
        "end_tokens": end_tokens(model.config),
        "sampling_defaults": sampling,
        "layers": {kind: len(mixers) for kind, mixers in model.mixers().items()},
        "longest_sequence": align.max_model_len,
        "blocks_of_a_running_request": align.blocks_per_request(config.steps_in_flight, max_chunk=0),
    }
    if options.json:
        print(json.dumps(of_model | explained.as_dict()))
        return 0
    lines = of_model | {
        "end_tokens": ", ".join(map(str, end_tokens(model.config))) or "none",
        "sampling_defaults": ", ".join(f"{name} {value}" for name, value in sampling.items()) or "none",
        "layers": ", ".join(f"{len(mixers)} {kind}" for kind, mixers in model.mixers().items()),
    }
    table = Table(show_header=False)
    for name, value in (*lines.items(), *explained.lines()):
        table.add_row(name.replace("_", " "), str(value))
    _CONSOLE.print(table)
    return 0


def _trace(options: argparse.Namespace) -> int:
    from mamba_align_jax.engine.running import trace

    # Plain lines suit pipes, and they are wider than a terminal's table.
    try:
        print(trace.HEADING)
        for step in trace.read_trace(options.file):
            for line in trace.lines(step, options.request):
                print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads this, as `head`, has seen enough. Python writes what is left when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _bench(options: argparse.Namespace) -> int:
    model = _load_model(options, options.dtype)
    with _CONSOLE.status("") as status:
        rows = bench.bench(model, options, lambda mode: status.update(f"timing {mode}"))
    table = Table(box=None, padding=(0, 2, 0, 0))
    # In a narrow terminal the names of the modes are wrapped, so that the numbers stay whole.
    table.add_column("mode", overflow="fold")
    for heading in ("TTFT ms", "p99", "TPOT ms", "ITL p99", "tokens/s", "hits"):
        table.add_column(heading, justify="right", no_wrap=True)
    names = ("ttft_ms_mean", "ttft_ms_p99", "tpot_ms_mean", "itl_ms_p99", "output_tokens_per_s")
    for row in rows:
        table.add_row(row["mode"], *(f"{row[name]:.1f}" for name in names), f"{row['hit_rate_of_attainable']:.1%}")
    _CONSOLE.print(table)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mamba-align", description="Align-mode prefix caching for hybrid models.")
    parser.add_argument("--version", action="version", version=f"mamba-align {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    model = argparse.ArgumentParser(add_help=False)
    text = "a Hugging Face directory, or ORG/NAME or ORG/NAME@REVISION to download; default: the bundled model"
    model.add_argument("directory", nargs="?", metavar="MODEL", help=text)
    model.add_argument("--model", default=str(BYTE_MODEL), help="the same")
    model.add_argument("--revision", metavar="REV", help="a branch, tag or commit of the model that is downloaded")
    text = "the share of a GPU's whole memory that is used, weights included (default: %(default)s)"
    model.add_argument("--gpu-memory-utilization", type=float, default=GPU_SHARE, metavar="X", help=text)

    def add(
        name: str, run: Callable[[argparse.Namespace], int], text: str, *options: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, parents=options, add_help=False)
        text = "show this help, or with --help=TEXT a group, or the options whose names have the text"
        command.add_argument("-h", "--help", action=Help, nargs="?", metavar="TEXT", help=text)
        command.set_defaults(run=run, parser=command)
        return command

    demo = add("demo", _demo, "serve the same requests in every mode, check every token, and compare", model)
    demo.add_argument("--json", metavar="FILE", help="write the table's numbers to FILE")

    generate = add("generate", _generate, "continue a text", model)
    generate.add_argument("text", nargs="?", metavar="PROMPT", help="the text; default: what standard input holds")
    generate.add_argument("--prompt", metavar="TEXT", help="the same, where no model is named")
    generate.add_argument("--n", type=int, default=1, metavar="N", help="write N texts, each with the next seed")
    _add_sampling(generate, max_tokens=128)

    chat = add("chat", _chat, "talk with a model, whose cache keeps what was said", model)
    chat.add_argument("--system", default="", metavar="TEXT", help="what the model is told first")
    _add_sampling(chat, max_tokens=512)

    serve = add("serve", _serve, "serve a model over HTTP, with OpenAI's API", model)
    serve.usage = "%(prog)s [MODEL] [options]"
    text = "a YAML file with options, whose keys are their names without dashes; those of the command line win"
    serve.add_argument("--config", type=Path, metavar="FILE", help=text)
    serving.add_options(serve)

    info = add("info", _info, "show what a model's states cost and how many blocks fit", model)
    info.add_argument("--json", action="store_true", help="print JSON")
    text = "plan for a GPU with this memory, in 1e9 bytes, instead of this machine's device"
    info.add_argument("--gpu-memory-gb", type=float, metavar="N", help=text)
    text = "the kind of that GPU, for its speed (default: %(default)s)"
    info.add_argument("--gpu", default="NVIDIA H200", metavar="NAME", help=text)
    serving.add_weights_dtype(info)
    serving.add_engine_options(info.add_argument_group("engine"))

    steps = add("trace", _trace, "print a file that Engine.trace wrote, one line for each row of each step")
    steps.add_argument("file", metavar="FILE", type=Path)
    steps.add_argument("--request", type=int, metavar="ID", help="print this request only")

    # `__main__` runs it, because it needs no extra.
    commands.add_parser("env", help=env.ABOUT).set_defaults(run=lambda options: env.main([]))

    load = add("bench", _bench, "time the engine under load, in several modes", model)
    serving.add_dtype(load)
    bench.add_options(load)
    return parser


def _add_sampling(command: argparse.ArgumentParser, max_tokens: int) -> None:
    """Adds the options of a command that generates text."""
    add, number = command.add_argument, dict(type=int, metavar="N")
    add("--max-tokens", **number, default=max_tokens, help="write at most N tokens (default: %(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, takes the most likely tokens")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from the most likely tokens up to this probability")
    add("--top-k", **number, default=0, help="draw from the N most likely tokens")
    add("--seed", **number, default=0, help="equal seeds draw equal tokens (default: %(default)s)")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be given several times")
    serving.add_dtype(command)


def _take_memory(share: float) -> None:
    """Gives JAX's client a share of each GPU's whole memory. It takes effect before JAX has looked for devices."""
    import jax

    values.number("gpu_memory_utilization", share, values.FLOAT32_MIN, 1, "in (0, 1]")
    given = getattr(jax.config, "jax_pjrt_client_create_options", None)
    is_set = given or any(name in os.environ for name in _JAX_SETTINGS)
    if share != GPU_SHARE or not is_set:
        jax.config.update("jax_pjrt_client_create_options", {"memory_fraction": share})


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Bad input is reported in one line on stderr, with status 2. An interrupt has status 130, as in shells.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if getattr(options, "config", None) is not None:
            # What the file says takes the place of the defaults.
            options.parser.set_defaults(**vars(options.parser.parse_args(options_in(options.config))))
            options = parser.parse_args(arguments)
        outlines = tempfile.TemporaryDirectory() if options.run is _info else contextlib.nullcontext()
        with outlines as folder:
            if "model" in options:
                asked = options.directory or options.model, options.revision
                options.model, options.model_name = find_model(*asked, outlines=Path(folder) if folder else None)
            if getattr(options, "dtype", None) == "auto":
                options.dtype = None
            if "gpu_memory_utilization" in options:
                _take_memory(options.gpu_memory_utilization)
            return options.run(options)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"mamba-align: {error}", file=sys.stderr)
        return 2
