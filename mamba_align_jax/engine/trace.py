"""What each step did, row by row, as a file of JSON lines: what a trace is, and how it is written, read and printed."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mamba_align_jax.align.columns import boundary_save, certain_tokens, tokens_after
from mamba_align_jax.engine.scheduler import Row


@dataclass(frozen=True, kw_only=True)
class TracedRow:
    """One request's part in a step.

    Attributes:
        request: Its id.
        prefill: Whether it ran known tokens, a prompt's or a preempted request's.
        enters: Whether the request entered with it, on a hit of `computed` tokens.
        computed: Tokens whose states there were before it.
        scheduled: Tokens that it ran, places for drafts included.
        drafts: Places for drafts, at its end.
        proposed: How many of them had one.
        accepted: Drafts that the model agreed with. After the row, `computed` - `drafts` + `scheduled` + `accepted` tokens
            have states, those behind a stop token included.
        columns: The (column, block) entries that are new in the request's row of the block table.
        saved: The boundary, in tokens, that it reached or passed and whose state is in its column now; 0 for none.
        published: The boundary that it offered to the prefix cache, behind no stop token; 0 for none.
        gone: Whether the request had left when the result was read: it came to nothing, and `computed` may be less than it
            was.
    """

    request: int
    prefill: bool
    enters: bool
    computed: int
    scheduled: int
    drafts: int
    proposed: int
    accepted: int
    columns: tuple[tuple[int, int], ...]
    saved: int
    published: int
    gone: bool


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step, decode rows first. `copied_bytes` of states moved in it; `null_reads` rows lost theirs, which is a bug."""

    step: int
    copied_bytes: int
    null_reads: int
    rows: tuple[TracedRow, ...]


def traced_row(row: Row, proposed: int, sampled: Sequence[int], gone: bool, block_size: int) -> TracedRow:
    """What a row came to.

    Args:
        row: As it is once its result was taken in.
        proposed: Drafts that it had.
        sampled: The tokens sampled by it, those behind a stop token included; none if it doesn't sample.
        gone: Whether the result was not taken in, as the request had left.
        block_size: Tokens between boundaries: `AlignConfig.state_block_size`.
    """
    drafts, accepted = len(row.drafts), max(len(sampled) - 1, 0)
    certain = certain_tokens(row.start, row.num_tokens, drafts)
    save = boundary_save(certain, tokens_after(certain, 1 + accepted), block_size)
    return TracedRow(
        request=row.request.id,
        prefill=row.is_prefilling,
        enters=row.enters,
        computed=row.start,
        scheduled=row.num_tokens,
        drafts=drafts,
        proposed=proposed,
        accepted=accepted,
        columns=tuple(row.allocation.columns),
        saved=certain + save.offset if save.passed else 0,
        published=row.published,
        gone=gone,
    )


@contextlib.contextmanager
def write_trace(path: str | Path) -> Iterator[Callable[[TracedStep], None]]:
    """Opens a file, and replaces it; gives what adds a step, which is in the file at once.

    Raises:
        OSError: the file can't be written.
    """
    with Path(path).open("w", buffering=1) as file:
        yield lambda step: print(json.dumps(asdict(step), separators=(",", ":")), file=file)


def read_trace(path: str | Path) -> Iterator[TracedStep]:
    """The steps of a file, as they are read.

    Raises:
        OSError: there is no such file.
        ValueError: a line isn't a step; it is named.
    """
    with Path(path).open() as file:
        for number, line in enumerate(file, start=1):
            try:
                step = json.loads(line)
                for row in step["rows"]:
                    row["columns"] = tuple((column, block) for column, block in row["columns"])
                step["rows"] = tuple(TracedRow(**row) for row in step["rows"])
                yield TracedStep(**step)
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}: line {number} is no step of a trace: {error}") from error


_LINE = "{:>6} {:>7} {:7} {:>8} {:>9} {:>8} {:>7} {:>9} {:>10}  {}"
HEADING = _LINE.format(
    "step", "request", "row", "computed", "scheduled", "accepted", "saved", "published", "copied", "new columns"
)


def lines(step: TracedStep, request: int | None = None) -> Iterator[str]:
    """A line for each row, under `HEADING`; of one request alone, if one is named. Bytes copied are the whole step's."""
    if step.null_reads:
        yield f"{step.step:>6} {step.null_reads} rows had lost their states"
    for row in step.rows:
        if request in (None, row.request):
            yield _LINE.format(
                step.step,
                row.request,
                "gone" if row.gone else "enters" if row.enters else "prefill" if row.prefill else "decode",
                row.computed,
                row.scheduled,
                f"{row.accepted}/{row.proposed}" if row.drafts else "",
                row.saved or "",
                row.published or "",
                step.copied_bytes or "",
                " ".join(f"{column}:{block}" for column, block in row.columns),
            ).rstrip()
