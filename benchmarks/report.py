"""Makes Markdown tables from rows of results: `python -m benchmarks.report benchmarks/results/kernels.jsonl`.

A results file has one JSON row per line. New rows are appended, and the newest row of each key counts (`reading.key`).
`tables` finds the kinds of rows in a list and makes a table of each kind. The functions that it calls can be used alone.
Every number in a table comes from a row.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.reading import Row, gpu, how, loads, named, natural, newest, read_rows, tokens_a_step, variant


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Formats a table with one header line; one without other lines is ""."""
    first, *rest = (f"| {' | '.join(line)} |" for line in (header, *lines))
    if not rest:
        return ""
    return "\n".join([first, "|" + "---|" * len(header), *rest])


def pivot(rows: list[Row], left: Sequence[str], top: Callable[[Row], str], show: Callable[[Row], str]) -> str:
    """Makes a table that compares rows side by side.

    Args:
        rows: The rows.
        left: The fields that name a line. Each combination of their values has a line, in order of appearance; rows that
            were run in different ways have different lines.
        top: Returns the heading of a row's column. Columns are in order of appearance.
        show: Returns the text of a row's cell.
    """
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        first, *others = (str(row[name]) for name in left)
        cells.setdefault((first + variant(row, *left), *others), {})[top(row)] = show(row)
    columns = dict.fromkeys(map(top, rows))
    return markdown((*left, *columns), ((*key, *(line.get(c, "-") for c in columns)) for key, line in cells.items()))


def kernel_table(rows: list[Row]) -> str:
    """Tabulates kernels: the time of a turn, its share of the GPU's copy rate, and the fastest peer."""
    lines = []
    for row in sorted(rows, key=natural):
        # A launch that moves next to nothing has no meaningful bandwidth.
        share = f"{row['bandwidth_fraction']:.2f}" if row["bandwidth_fraction"] >= 0.05 else "-"
        peer = (f"{row['peer']} {row['peer_us']:.1f} us", f"{row['ratio']:.2f}") if "peer" in row else ("-", "-")
        lines.append((named(row), f"{row['us']:.1f} us", share, *peer))
    return markdown(("case", "time", "of the copy rate", "peer", "ratio"), lines)


def span_table(rows: list[Row]) -> str:
    """Tabulates prefill kernels: the span from one turn's start to the next one's, and the error against float64."""
    us, error = (lambda value: f"{value:.1f} us"), (lambda value: f"{value:.1e}")
    columns = dict(span_us=us, peer_span_us=us, rms_error=error, peer_rms_error=error)
    cells = lambda row: ["-" if row.get(name) is None else show(row[name]) for name, show in columns.items()]
    header = "case", "span", "peer's span", "rms error", "peer's rms error"
    return markdown(header, ((named(row), *cells(row)) for row in sorted(rows, key=natural) if "span_us" in row))


def _policy(row: Row) -> str:
    return row["policy"] if row["policy"] == "none" else f"{row['policy']} {row['crossing']}"


def step_time_table(rows: list[Row]) -> str:
    """Tabulates the time of a step's kernels and the span of a step, by policy and share of crossing rows."""
    return pivot(rows, ("rows", "drafts"), _policy, lambda row: f"{row['us']:.0f} / {row['span_us']:.0f} us")


def step_bytes_table(rows: list[Row]) -> str:
    """Tabulates the bytes of states that a step moves, by policy and share of crossing rows."""
    moved = lambda row: f"{(row['state_bytes'] + row['copied_bytes']) / 1e6:.1f} MB"
    return pivot(rows, ("rows", "drafts"), _policy, moved)


def bookkeeping_table(rows: list[Row]) -> str:
    """Tabulates the time and the number of kernels of a step's bookkeeping, by the number of layers."""
    layers = lambda row: f"{row['layers']} layers"
    return pivot(rows, ("policy", "drafts"), layers, lambda row: f"{row['us']:.1f} us, {row['kernels']} kernels")


def _drafts(row: Row) -> str:
    return f"{row['drafts']}, {row['speculation']}" if row["drafts"] else "0"


# What the load of a row of the serving benchmark is, whichever configuration the engine had.
_SERVING = "workload", "requests", "loop", "mode", "speculation", "drafts"
_CHOICES = {
    "prefix_cache": "{}", "policy": "{}", "async_stepping": "{}", "block_size": "blocks of {}",
    "kv_page_size": "pages of {}", "max_num_seqs": "{} requests", "max_num_batched_tokens": "{} tokens a step",
}  # fmt: skip


def _chosen(row: Row) -> str:
    said = row | {"async_stepping": "asynchronous" if row.get("async_stepping") else "synchronous"}
    return ", ".join(words.format(said[name]) for name, words in _CHOICES.items() if name in row)


def _beside(rows: list[Row], what: Sequence[str]) -> tuple[list[Row], list[tuple[Row, Row | None]]]:
    """Splits rows by configuration.

    Returns:
        The rows whose configuration isn't "defaults"; and each row whose configuration it is, with the row of the
        benchmark's configuration that measured the same at the same commit. Fields in `what` say what is the same.
    """
    is_default = lambda row: how(row)["configuration"] == "defaults"
    same = lambda row: (row.get("commit"), *map(row.get, what), *(how(row) | {"configuration": "benchmark"}).values())
    own = [row for row in rows if not is_default(row)]
    others = {same(row): row for row in own if how(row)["configuration"] == "benchmark"}
    return own, [(row, others.get(same(row))) for row in rows if is_default(row)]


def _load(row: Row) -> str:
    return f"{row['workload']} x{row['requests']}{tokens_a_step(row)}{variant(row)}"


def serving_table(rows: list[Row]) -> str:
    """Tabulates serving: latencies, rates, cache hits, and the ratio of latencies to mode "none" under the same load.

    The rows that are compared are of one commit (`reading.loads`). Newer rows of other commits are at the end.
    """
    rows, _ = _beside(rows, _SERVING)
    compared = loads(rows)
    uncached = {id(row): each["none"] for each in compared for row in each.values() if "none" in each}
    shown = [row for each in compared for row in each.values()]
    shown += [row for row in rows if not any(row is other for other in shown)]

    def line(row: Row) -> tuple[str, ...]:
        none = uncached.get(id(row))
        ratio = lambda name: f"{row[name] / none[name]:.2f}" if none else "-"
        latency = lambda name: f"{row[f'{name}_ms_mean']:.1f} / {row[f'{name}_ms_p99']:.1f}"
        return (
            _load(row), row["loop"], row["mode"], _drafts(row),
            latency("ttft"),
            f"{row['tpot_ms_mean']:.2f}", latency("itl"), f"{row['e2e_ms_mean']:.0f}",
            f"{row['output_tokens_per_s']:.0f}", f"{row['hit_rate_of_attainable']:.3f}", ratio("ttft_ms_mean"),
            ratio("tpot_ms_mean"), f"{row.get('runs', 1)} at {row.get('commit', '-')}",
        )  # fmt: skip

    header = (
        "workload", "loop", "mode", "drafts", "TTFT mean / p99 ms", "TPOT ms", "ITL mean / p99 ms", "E2E ms", "tokens/s",
        "hits of attainable", "TTFT vs none", "TPOT vs none", "runs",
    )  # fmt: skip
    return markdown(header, map(line, shown))


def serving_defaults_table(rows: list[Row]) -> str:
    """Tabulates what `Engine(model)` does under load, each number beside that of the benchmark's configuration."""

    def line(row: Row, other: Row | None) -> tuple[str, ...]:
        pair = lambda name, form: f"{row[name]:{form}} / " + (f"{other[name]:{form}}" if other else "-")
        return (
            f"{row['workload']} x{row['requests']}{variant(row, 'configuration')}", row["loop"], row["mode"],
            _drafts(row), pair("ttft_ms_mean", ".1f"), pair("tpot_ms_mean", ".2f"), pair("itl_ms_p99", ".1f"),
            pair("output_tokens_per_s", ".0f"), _chosen(row),
        )  # fmt: skip

    _, pairs = _beside(rows, _SERVING)
    names = "TTFT ms", "TPOT ms", "ITL p99 ms", "tokens/s"
    header = "workload", "loop", "mode", "drafts", *(f"{name}, defaults / benchmark" for name in names), "chosen"
    return markdown(header, (line(*pair) for pair in pairs))


def start_table(rows: list[Row]) -> str:
    """Tabulates the seconds that an engine or a server takes to start: a column for each field that ends in "_s"."""
    seconds = list(dict.fromkeys(name for row in rows for name in row if name.endswith("_s")))
    lines = (
        (
            named(row, "model", "gpu"), row["model"], "CPU" if gpu(row) == "none" else gpu(row),
            *(f"{row[name]:.1f}" if name in row else "-" for name in seconds), row.get("commit", "-"),
        )
        for row in rows
    )  # fmt: skip
    names = (f"{name[:-2].replace('_', ' ')}, s" for name in seconds)
    return markdown(("start", "model", "on", *names, "commit"), lines)


def published_table(rows: list[Row]) -> str:
    """Tabulates serving results that others have published, with their source."""
    lines = (
        (
            named(row, "model", "gpu"), row["model"], row["gpu"], str(row["requests"]), str(row["drafts"]),
            f"{row['ttft_ms_mean']:.2f}",
            f"{row['tpot_ms_mean']:.2f}", f"{row['itl_ms_mean']:.2f}", f"{row['output_tokens_per_s']:.2f}",
            f"<{row['source']}>",
        )
        for row in rows
    )  # fmt: skip
    header = "case", "model", "GPUs", "requests", "drafts", "TTFT ms", "TPOT ms", "ITL ms", "tokens/s", "source"
    return markdown(header, lines)


def idle_table(rows: list[Row]) -> str:
    """Tabulates decode steps: how long the GPU waits between them, and the share of time in which kernels run."""
    share = lambda row, name: f"{100 * row[name]:.1f} %"
    header = "mode", "drafts", "rows", "step", "gap", "idle between steps", "kernels run"
    lines = (
        (
            row["mode"] + (", asynchronous" if row["async_stepping"] else "") + variant(row), _drafts(row), str(row["rows"]),
            f"{row['step_us']:.0f} us", f"{row['gap_us']:.0f} us", share(row, "idle_share"), share(row, "busy_share"),
        )
        for row in rows
    )  # fmt: skip
    return markdown(header, lines)


def precision_table(rows: list[Row]) -> str:
    """Tabulates bfloat16 against float32 for each architecture, and the ops that have no kernel."""
    header = (
        "model", "tokens", "same token first", "rms error", "of prompts", "of decode steps", "largest loss", "XLA runs",
    )  # fmt: skip

    def line(row: Row) -> tuple[str, ...]:
        xla = [f"{op} ({dtype})" for dtype in ("bfloat16", "float32") for op in row[f"xla_ops_{dtype}"]]
        errors = (f"{row[name]:.1e}" for name in ("rms_error", "prefill_rms_error", "decode_rms_error", "largest_loss"))
        return (
            row["model"] + variant(row, "model"),
            str(row["tokens"]),
            f"{100 * row['top1_agreement']:.2f} %",
            *errors,
            ", ".join(xla) or "-",
        )

    return markdown(header, map(line, rows))


def device_table(rows: list[Row]) -> str:
    """Tabulates decode steps on several devices: times, memory, and the share of tokens that equal one device's."""
    header = (
        "case", "devices", "step", "the engine's step", "weights per device", "states and keys per device",
        "tokens equal to one device's",
    )  # fmt: skip
    lines = (
        (
            named(row, "devices"), str(row["devices"]), f"{row['step_us']:.0f} us", f"{row['engine_us']:.0f} us",
            f"{row['weight_bytes_per_device'] / 1e9:.1f} GB", f"{row['pool_bytes_per_device'] / 1e9:.1f} GB",
            f"{100 * row['agreement']:.1f} %",
        )
        for row in rows
    )  # fmt: skip
    return markdown(header, lines)


def process_table(rows: list[Row]) -> str:
    """Tabulates engines over one process and over several, on the same devices."""
    header = "case", "devices", "the engine's step", "its 90th percentile", "prompt tokens per s", "tokens equal"
    lines = (
        (
            named(row, "devices"), str(row["devices"]), f"{row['engine_us']:.0f} us", f"{row['engine_us_p90']:.0f} us",
            f"{row['prompt_tokens_per_s']:.0f}", f"{row['agreement']:.1%}",
        )
        for row in rows
    )  # fmt: skip
    return markdown(header, lines)


def transfer_table(rows: list[Row]) -> str:
    """Tabulates moving a prefix to another engine, beside computing it there: bytes, times and rates through the host."""
    pair = lambda row, *names: " / ".join(f"{row[name]:.2f}" for name in names)
    lines = (
        (
            named(row), f"{row['bytes'] / 1e6:.0f} MB", f"{row['prompt_ms']:.0f} ms", f"{row['export_ms']:.0f} ms",
            f"{row['import_ms']:.0f} ms", pair(row, "export_gb_per_s", "import_gb_per_s"),
            pair(row, "save_gb_per_s", "load_gb_per_s"),
        )
        for row in rows
    )  # fmt: skip
    header = "case", "bundle", "computed in", "exported in", "imported in", "export / import, GB/s", "save / load, GB/s"
    return markdown(header, lines)


def sequence_table(rows: list[Row]) -> str:
    """Tabulates the greedy float32 sequences that several devices generate, and how many differ from one device's."""
    names = "case", "devices", "sequences", "tokens_each", "sequences_that_differ", "of_these_wrong"
    lines = ([named(row, "devices"), *(str(row[name]) for name in names[1:])] for row in rows)
    return markdown([name.replace("_", " ") for name in names], lines)


def _us(row: Row) -> float:
    return 1e3 * row["ttft_ms"] if "ttft_ms" in row else row["step_us"]


def model_table(rows: list[Row]) -> str:
    """Tabulates whole models beside their floors: the engine's own step, or the time to a prompt's first token."""

    def line(row: Row) -> tuple[str, ...]:
        us = _us(row)
        busy, kernels = (f"{row[name]:.0f}" if name in row else "-" for name in ("busy_us", "kernels"))
        floor, ratio = f"{row['floor_us'] / 1e3:.2f} ms", f"{us / row['floor_us']:.2f}"
        return named(row), f"{us / 1e3:.2f} ms", floor, ratio, busy, kernels, row.get("commit", "-")

    rows, _ = _beside(rows, ("case",))
    header = "case", "time", "floor", "ratio", "kernels run, us", "kernels", "commit"
    return markdown(header, map(line, sorted(rows, key=natural)))


def model_defaults_table(rows: list[Row]) -> str:
    """Tabulates what `Engine(model)` takes beside the benchmark's configuration, and what it chose."""

    def line(row: Row, other: Row | None) -> tuple[str, ...]:
        times = (f"{_us(other) / 1e3:.2f} ms", f"{_us(row) / _us(other):.2f}") if other else ("-", "-")
        return named(row, "configuration"), f"{_us(row) / 1e3:.2f} ms", *times, _chosen(row)

    _, pairs = _beside(rows, ("case",))
    header = "case", "defaults", "the benchmark's configuration", "ratio", "chosen"
    return markdown(header, (line(*pair) for pair in pairs))


def attention_table(rows: list[Row]) -> str:
    """Tabulates paged attention in microseconds, each implementation in a column, and the Triton kernels' bandwidth."""
    rate = {named(row): f"{row['tb_s']:.2f}" for row in rows if row["candidate"] == "triton"}
    kept = [row | {"TB/s of triton": rate.get(named(row), "-")} for row in rows if "us" in row]
    return pivot(kept, ("case", "TB/s of triton"), lambda row: row["candidate"], lambda row: f"{row['us']:.1f} us")


def linear_table(rows: list[Row]) -> str:
    """Tabulates dense products: the default setting when it was timed, XLA's product, and the fastest setting."""
    timed = [row for row in rows if "us" in row]
    fastest = {named(row): row for row in sorted(timed, key=lambda row: row["us"], reverse=True)}
    kept = [row for row in timed if row["candidate"] in ("triton", "xla")]
    kept += [row | {"candidate": "fastest setting"} for row in fastest.values()]
    show = lambda row: f"{row['us']:.1f} us, {row['of_copy']:.2f}"
    return pivot(kept, ("case",), lambda row: row["candidate"], show)


def all_reduce_table(rows: list[Row]) -> str:
    """Tabulates sums over devices: the kernel, and XLA's all-reduce with the norm as a kernel of its own."""
    kept = [row for row in rows if "us" in row]
    return pivot(kept, ("case", "devices"), lambda row: row["candidate"], lambda row: f"{row['us']:.1f} us")


def deferred_table(rows: list[Row]) -> str:
    """Tabulates deferred states: each kernel, and the kernel that writes a state after each token."""
    kept = [row for row in rows if "us" in row]
    kept += [row | {"candidate": "`copy_free`", "us": row["copy_free_us"]} for row in kept]
    return pivot(kept, ("case",), lambda row: row["candidate"], lambda row: f"{row['us']:.1f} us")


def memory_table(rows: list[Row]) -> str:
    """Tabulates running requests that fit in memory, and the blocks that each is counted with, by policy."""
    show = lambda row: f"{row['requests_that_fit']}, with {row['blocks']:.2f} blocks"
    return pivot(rows, ("model", "drafts", "count"), lambda row: row["policy"], show)


def routing_table(rows: list[Row]) -> str:
    """Tabulates simulated routers: the share of attainable tokens that were hits, and the share of all prompt tokens."""
    show = lambda row: f"{row['share']:.1%}, {row['cached_share']:.1%}"
    return pivot(rows, ("case",), lambda row: row["routing"], show)


def server_table(rows: list[Row]) -> str:
    """Tabulates the same load through the engine and through the server: medians, and what the server adds."""

    def line(row: Row) -> tuple[str, ...]:
        pairs = (
            f"{row[f'engine_{name}']:.2f} / {row[f'server_{name}']:.2f} ms" for name in ("ttft_ms_p50", "tpot_ms_p50")
        )
        return named(row), *pairs, f"{row['overhead_tpot_share']:+.1%}", f"{row['overhead_e2e_ms_p50']:.1f} ms"

    header = "case", "TTFT, engine / server", "TPOT, engine / server", "TPOT, difference", "whole answer, difference"
    return markdown(header, map(line, rows))


def neighbours_table(rows: list[Row]) -> str:
    """Tabulates the times between a client's tokens, alone and while the clients of each case misbehave."""

    def line(row: Row) -> tuple[str, ...]:
        names = "gap_ms_p50", "gap_ms_p99", "first_ms_p50"
        case = named(row).removeprefix("neighbours ").removesuffix(", none")  # rows of a CPU name no GPU
        return case, *(f"{row[f'{name}_without']:.1f} / {row[f'{name}_with']:.1f} ms" for name in names)

    header = "case", "time between tokens, alone / beside", "99th percentile", "first token"
    return markdown(header, map(line, rows))


def tuning_table(rows: list[Row]) -> str:
    """Tabulates the fastest setting of each op and case."""
    fastest = {(row["op"], named(row)): row for row in sorted(rows, key=lambda row: row["us"], reverse=True)}
    lines = ((op, case, row["candidate"], f"{row['us']:.1f} us") for (op, case), row in sorted(fastest.items()))
    return markdown(("op", "case", "fastest setting", "time"), lines)


def launches_table(rows: list[Row]) -> str:
    """Tabulates how many launches programs have that were compiled for a GPU and not run."""
    lines = ((named(row), row["candidate"], str(row["launches"])) for row in rows)
    return markdown(("program", "candidate", "launches"), lines)


def check_table(rows: list[Row]) -> str:
    """Makes a table of what has been checked: tests, compute-sanitizer and soaks on a GPU, and the suite on a CPU."""
    counts = {name: name for name in ("passed", "failed", "errors", "requests", "wrong", "leaked")}
    counts["cpu_seconds"] = "CPU seconds"
    found = lambda row: ", ".join(f"{row[name]:.0f} {words}" for name, words in counts.items() if name in row)
    lines = [
        (
            row["kind"] + variant(row, "gpu"),
            *(row.get(name, "-") for name in ("gpu", "jax", "commit", "date")),
            found(row),
        )
        for row in rows
    ]
    return markdown(("check", "GPU", "JAX", "commit", "date", "found"), lines)


# For each kind of table: the field that only rows of this kind have, and the function that makes the table.
TABLES: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "kernels": ("bandwidth_fraction", kernel_table),
    "kernel spans": ("bandwidth_fraction", span_table),
    "bookkeeping": ("groups", bookkeeping_table),
    "step times": ("crossing", step_time_table),
    "step bytes": ("crossing", step_bytes_table),
    "serving": ("hit_rate_of_attainable", serving_table),
    "serving defaults": ("hit_rate_of_attainable", serving_defaults_table),
    "idle": ("idle_share", idle_table),
    "precision": ("top1_agreement", precision_table),
    "devices": ("weight_bytes_per_device", device_table),
    "processes": ("engine_us_p90", process_table),
    "transfer": ("export_gb_per_s", transfer_table),
    "sequences": ("sequences", sequence_table),
    "published": ("source", published_table),
    "models": ("floor_us", model_table),
    "model defaults": ("floor_us", model_defaults_table),
    "starts": ("first_answer_s", start_table),
    "attention": ("same_bits", attention_table),
    "linear": ("of_copy", linear_table),
    "all_reduce": ("same_on_all", all_reduce_table),
    "deferred": ("copy_free_us", deferred_table),
    "memory": ("requests_that_fit", memory_table),
    "routing": ("routing", routing_table),
    "server": ("overhead_tpot_share", server_table),
    "neighbours": ("gap_ms_p50_with", neighbours_table),
    "tuning": ("op", tuning_table),
    "launches": ("compiled_for", launches_table),
    "checks": ("kind", check_table),
}


def tables(rows: Iterable[Row]) -> dict[str, str]:
    """Makes a Markdown table of each kind of rows: the names are those of `TABLES`, the newest row of each case counts."""
    latest = newest(rows)
    made = {name: make([row for row in latest if field in row]) for name, (field, make) in TABLES.items()}
    return {name: text for name, text in made.items() if text}


def machines(rows: Iterable[Row]) -> str:
    """Lists the machines on which the newest rows were measured, with commits and dates, as a Markdown list."""
    dates: dict[tuple[str, ...], set[str]] = {}
    commits: dict[tuple[str, ...], dict[str, None]] = {}
    for row in newest(rows):
        if "driver" in row:
            machine = row["gpu"], row["driver"], row["jax"]
            dates.setdefault(machine, set()).update([row["date"]] if "date" in row else [])
            commits.setdefault(machine, {})[row["commit"]] = None
    return "\n".join(
        f"- {gpu}, driver {driver}, JAX {jax}, at {', '.join(commits[gpu, driver, jax])}"
        + (f", {' to '.join(sorted({min(days), max(days)}))}" if days else "")
        for (gpu, driver, jax), days in dates.items()
    )


def table(file: Path) -> str:
    """Makes the tables of a results file, with an empty line between them."""
    return "\n\n".join(tables(read_rows(file)).values())


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
