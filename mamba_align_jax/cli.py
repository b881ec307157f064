"""The command line: `mamba-align demo | generate | info | trace | bench`."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mamba_align_jax.data import BYTE_MODEL, decode, encode
from mamba_align_jax.engine import trace
from mamba_align_jax.engine.config import EngineConfig, SamplingParams

_CONSOLE = Console()


@contextlib.contextmanager
def _loading() -> Iterator[Callable[[int, int], None]]:
    """Shows how far a checkpoint is read, beside the command's output, and leaves nothing behind."""
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("loading", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _demo(options: argparse.Namespace) -> int:
    from mamba_align_jax import demo
    from mamba_align_jax.engine.reference import Reference
    from mamba_align_jax.models import load_model

    # float32, so that rounding can't hide a wrong state; the bundled weights are bfloat16.
    with _loading() as advance:
        model = load_model(options.model, "float32", advance)
    reference = Reference(model)
    runs = []
    with Progress(console=_CONSOLE) as progress:
        for mode in demo.MODES:
            task = progress.add_task(mode)

            def start(turns: int, task=task) -> Callable[[], None]:
                progress.update(task, total=turns)
                return lambda: progress.advance(task)

            engine = demo.make_engine(model, mode)
            run, count = demo.run_mode(engine, reference, mode, start)
            runs.append(run)
    caption = "tokens; milliseconds; states copied"
    # Eighty columns hold it without lines between.
    table = Table(title=f"{count} requests in every mode", caption=caption, box=None, padding=(0, 2, 0, 0))
    for heading in ("mode", "prompt", "cached", "computed", "TTFT", "TPOT", "copied", "right/ties"):
        table.add_column(heading, justify="left" if heading == "mode" else "right", no_wrap=True)
    for run in runs:
        table.add_row(
            run.mode, str(run.prompt_tokens), f"{run.cached_tokens} {run.cached_tokens / run.prompt_tokens:.0%}",
            str(run.prefill_tokens), f"{run.ttft_ms:.1f}", f"{run.tpot_ms:.1f}", f"{run.state_bytes_copied / 1e6:.1f} MB",
            ("right" if run.identical else "[bold red]WRONG[/]") + f"/{run.ties}",
        )  # fmt: skip
    _CONSOLE.print(table)
    prompt, text = demo.sample(engine)
    _CONSOLE.print("The model goes on after the mark:")
    _CONSOLE.print(f"{prompt}▮{text}", markup=False, highlight=False)
    if options.json:
        Path(options.json).write_text(demo.to_json(runs))
    return 0 if all(run.identical for run in runs) else 1


def _generate(options: argparse.Namespace) -> int:
    from mamba_align_jax.engine.engine import Engine

    with _loading() as advance:
        engine = Engine.from_pretrained(
            options.model, EngineConfig(max_num_seqs=1), dtype=options.dtype, advance=advance
        )
    # The bundled model's tokens are bytes.
    in_bytes = engine.tokenizer is None and engine.model_config.vocab_size == 256
    params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed)
    (output,) = engine.generate(encode(options.prompt) if in_bytes else options.prompt, params)
    text = decode(output.token_ids) if in_bytes else output.text
    _CONSOLE.print(f"{options.prompt}{text}", markup=False, highlight=False)
    return 0


def _info(options: argparse.Namespace) -> int:
    from mamba_align_jax.engine.sizing import align_config, pool_sizes
    from mamba_align_jax.models import load_model

    config = EngineConfig(prefix_cache=options.prefix_cache, block_size=options.block_size)
    with _loading() as advance:
        model = load_model(options.model, advance=advance)
    spec = align_config(config, model)
    sizes = pool_sizes(spec, config, model)
    table = Table(show_header=False)
    for name, value in (
        ("layers", ", ".join(f"{len(mixers)} {kind}" for kind, mixers in model.mixers().items())),
        ("tokens per state block", spec.block_size),
        ("state bytes per block", f"{spec.bytes_per_block:,}"),
        ("blocks per running request", spec.blocks_per_request()),
        ("state blocks that fit", f"{sizes.state_blocks - 1:,}"),
        ("KV bytes per page", f"{sizes.kv_page_bytes:,} ({config.kv_page_size} tokens)"),
        ("KV pages that fit", f"{sizes.kv_pages - 1:,}"),
        ("longest sequence", spec.max_model_len),
    ):
        table.add_row(name, str(value))
    _CONSOLE.print(table)
    return 0


def _trace(options: argparse.Namespace) -> int:
    # Plain lines: they are for pipes, and wider than a table may be.
    print(trace.HEADING)
    for step in trace.read_trace(options.file):
        for line in trace.lines(step, options.request):
            print(line)
    return 0


def _bench(options: argparse.Namespace) -> int:
    try:
        from benchmarks import serving
    except ModuleNotFoundError as error:
        raise ValueError(f"bench runs from a clone of the repository: {error}") from error
    rows = serving.main(options.rest)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("case", "TTFT", "p99", "TPOT", "ITL p99", "tokens/s", "hits", "idle"):
        table.add_column(heading, justify="left" if heading == "case" else "right", no_wrap=True)
    names = ("ttft_ms_mean", "ttft_ms_p99", "tpot_ms_mean", "itl_ms_p99", "output_tokens_per_s")
    for row in rows:
        share = lambda name, row=row: f"{row[name]:.1%}" if name in row else ""
        numbers = [f"{row[name]:.1f}" if name in row else "" for name in names]
        table.add_row(row["case"], *numbers, share("hit_rate_of_attainable"), share("idle_share"))
    _CONSOLE.print(table)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mamba-align", description="Align-mode prefix caching for hybrid models.")
    commands = parser.add_subparsers(dest="command", required=True)
    model = dict(
        type=Path, default=BYTE_MODEL, metavar="DIR", help="Hugging Face directory; default: the bundled model"
    )

    demo = commands.add_parser("demo", help="serve a workload in every mode, check it, and compare")
    demo.add_argument("--model", **model)
    demo.add_argument("--json", metavar="FILE", help="write the table's numbers to FILE")
    demo.set_defaults(run=_demo)

    generate = commands.add_parser("generate", help="continue a text")
    generate.add_argument("--model", **model)
    generate.add_argument("--prompt", required=True, metavar="TEXT")
    generate.add_argument("--max-tokens", type=int, default=128)
    generate.add_argument("--temperature", type=float, default=0.0)
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the checkpoint's")
    generate.set_defaults(run=_generate)

    info = commands.add_parser("info", help="what a model's states cost and how many blocks fit")
    info.add_argument("--model", **model)
    info.add_argument("--block-size", type=int, default=64)
    info.add_argument("--prefix-cache", default="align")
    info.set_defaults(run=_info)

    steps = commands.add_parser("trace", help="print what Engine.trace wrote, a line per row and step")
    steps.add_argument("file", metavar="FILE", type=Path)
    steps.add_argument("--request", type=int, metavar="ID", help="of this request alone")
    steps.set_defaults(run=_trace)

    # Its options are the benchmark's own.
    bench = commands.add_parser("bench", help="time the engine under load, mode by mode (--help)", add_help=False)
    bench.set_defaults(run=_bench)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; bad input ends with status 2 and one line."""
    parser = _parser()
    options, options.rest = parser.parse_known_args(arguments)
    if options.rest and options.run is not _bench:
        parser.error(f"unrecognized arguments: {' '.join(options.rest)}")
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"mamba-align: {error}", file=sys.stderr)
        return 2
