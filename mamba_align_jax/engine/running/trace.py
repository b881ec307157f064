"""Traces: files of JSON lines that tell what each step did, row by row. Writes, reads and prints them."""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mamba_align_jax import _values as values
from mamba_align_jax.align.columns import boundary_save, certain_tokens, tokens_after
from mamba_align_jax.engine.device.read_step import ReadStep
from mamba_align_jax.engine.interrupts import failure
from mamba_align_jax.engine.scheduling.scheduler import Row

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TracedRow:
    """One request's part in a step.

    Attributes:
        request: The request's id.
        prefill: Whether the row ran known tokens: a prompt's or a preempted request's.
        enters: Whether the row was the request's first after an admission; the cache then had `computed` tokens.
        computed: Number of tokens whose states existed before the row.
        scheduled: Number of tokens that it ran, places for drafts included.
        drafts: Number of places for drafts, at its end.
        proposed: Number of these places that had a draft.
        accepted: Number of drafts that the model agreed with. After the row, `computed - drafts + scheduled + accepted`
            tokens have states, those after a stop token included.
        columns: The (column, block) entries that are new in the request's row of the block table.
        saved: The boundary, in tokens, that the row reached or passed and whose state is in its column now; 0 for none.
            Under policy "deferred" the state follows with the request's next row, or with a fold when the request ends.
        published: The boundary, in tokens, that the row offered to the prefix cache, never after a stop token; 0 for
            none. Under policy "deferred" the row that passes a boundary has it if the next step was dispatched when the
            row's result was read, and else the next row; no row has it if the request ended there.
        gone: Whether the request had ended or been preempted when the result was read. The result was then dropped, and
            `computed` may be less than it was.
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
    """A step.

    Attributes:
        step: The number of the step, from 1 on.
        copied_bytes: Bytes of states that it copied between blocks.
        null_reads: Number of rows whose state was lost. More than 0 is a bug.
        rows: The rows, decode rows first.
    """

    step: int
    copied_bytes: int
    null_reads: int
    rows: tuple[TracedRow, ...]

    @classmethod
    def of(cls, read: ReadStep, number: int, late: Sequence[Row], block_size: int) -> "TracedStep":
        """Makes the trace of a step.

        Args:
            read: Its result. The rows' results were taken in.
            number: The number of the step.
            late: The rows whose results were dropped because their request had ended or been preempted.
            block_size: Number of tokens between boundaries: `AlignConfig.state_block_size`.
        """
        gone = set(map(id, late))
        rows = [traced_row(row, one.num_drafts, one.tokens, id(row) in gone, block_size) for row, one in read.rows]
        return cls(step=number, copied_bytes=read.copied_bytes, null_reads=read.null_reads, rows=tuple(rows))


def traced_row(row: Row, proposed: int, sampled: Sequence[int], gone: bool, block_size: int) -> TracedRow:
    """Makes the trace of a row.

    Args:
        row: The row after its result was taken in.
        proposed: Number of its drafts.
        sampled: The tokens that it sampled, those after a stop token included; none if it doesn't sample.
        gone: Whether the result was dropped because the request had ended or been preempted.
        block_size: Number of tokens between boundaries: `AlignConfig.state_block_size`.
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


class Tracing:
    """Hands each step to whoever writes the trace, if anyone does.

    Attributes:
        write: Is called with each step; None if no trace is written.
    """

    def __init__(self) -> None:
        """Traces nothing."""
        self.write: Callable[[TracedStep], None] | None = None

    def check(self, path: str | Path) -> None:
        """Checks that a trace may begin.

        Raises:
            ValueError: Another one is being written.
        """
        if self.write is not None:
            raise ValueError(f"trace: a trace is being written already, got {str(path)!r} for another one")

    def begin(self, path: str | Path, write: Callable[[TracedStep], None]) -> None:
        """Hands steps to `write` from now on, for the trace at `path`. It raises what `check` raises."""
        self.check(path)
        self.write = write

    def end(self, write: Callable[[TracedStep], None]) -> None:
        """Hands no more steps to `write`. A trace that has begun since goes on."""
        if self.write is write:
            self.write = None

    def record(self, read: ReadStep, number: int, late: Sequence[Row], block_size: int) -> None:
        """Hands over a step: see `TracedStep.of`. A trace that can't be written ends, and nothing else does."""
        if self.write is None:
            return
        try:
            self.write(TracedStep.of(read, number, late, block_size))
        except BaseException as raised:
            failure(raised)
            _LOG.exception("the trace ends here: a step could not be written")
            self.write = None


@contextlib.contextmanager
def write_trace(path: str | Path) -> Iterator[Callable[[TracedStep], None]]:
    """Creates or replaces a file, and gives a function that writes a step to it at once.

    If the function raises, the file keeps the steps before, and leaving this context does not raise it again.

    Raises:
        ValueError: `path` is neither text nor a path.
        OSError: The file can't be written.
    """
    values.instance("path", path, str, Path)
    file, has_failed = Path(path).open("w", buffering=1), False  # noqa: SIM115 - closed below

    def write(step: TracedStep) -> None:
        nonlocal has_failed
        try:
            print(json.dumps(asdict(step), separators=(",", ":")), file=file)
        except OSError:
            has_failed = True
            raise

    try:
        yield write
    finally:
        # What could not be written before is tried again now.
        with contextlib.suppress(*[OSError] if has_failed else []):
            file.close()


def read_trace(path: str | Path) -> Iterator[TracedStep]:
    """Reads a file, and yields its steps.

    Raises:
        OSError: There is no such file.
        ValueError: A line isn't a step. The error names the line.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                step = json.loads(line)
                for row in step["rows"]:
                    row["columns"] = tuple((column, block) for column, block in row["columns"])
                step["rows"] = tuple(TracedRow(**row) for row in step["rows"])
                yield TracedStep(**step)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise ValueError(f"{path}: line {number} is not a step of a trace: {error}") from error


_LINE = "{:>6} {:>7} {:7} {:>8} {:>9} {:>8} {:>7} {:>9} {:>10}  {}"
HEADING = _LINE.format(
    "step", "request", "row", "computed", "scheduled", "accepted", "saved", "published", "copied", "new columns"
)


def lines(step: TracedStep, request: int | None = None) -> Iterator[str]:
    """Yields a line for each row of a step, to be printed under `HEADING`.

    Args:
        step: The step. Each line shows the bytes that the whole step copied.
        request: Only rows of the request with this id; None for all rows.
    """
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
