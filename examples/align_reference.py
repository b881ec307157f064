"""Explains align mode in plain Python: every state is the text that it has read.

A recurrent layer has one state of fixed size, which every token changes. A server that wants to continue a cached prefix, or
to take back drafts, must have kept the right states. Align mode keeps them in blocks of a pool. A request has a table of
columns, each with a block: column c has the state after exactly (c + 1) * size tokens, once so many are computed. The
step in progress writes to the running column, and to one more column for each draft.

Here tokens are characters. A recurrent state is the string of all tokens before, and a convolution window is the string of
the last few, so every read and every copy can be checked by looking at it. `begin_step` and `finish_step` are those of the
library under the policies "copy_free" and "pre_copy", one row at a time. The tests compare them on random servers.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class Config:
    """The sizes: `size` tokens per block, at most `drafts` drafts in a step, `width` taps of the convolution."""

    size: int = 4
    drafts: int = 2
    width: int = 4
    policy: str = "copy_free"


@dataclass
class Request:
    """A request between two steps: `computed` tokens have states, and `table` maps a column to its block.

    After a step, the recurrent state is in column `running + accepted - 1`, because each draft has a column of its own. The
    window is in column `running` from row `accepted - 1` on, because one block has a row for each of the step's inputs.
    """

    tokens: str = ""
    computed: int = 0
    accepted: int = 1
    running: int = -1
    table: dict[int, int] = field(default_factory=dict)


class Copy(NamedTuple):
    """Copies the state of block `state`, and the window of block `window` from row `row` on, to block `to`."""

    state: int
    window: int
    row: int
    to: int


@dataclass
class Step:
    """Where a step reads and writes: blocks, of which 0 is none. `before` and `after` are copies around the model."""

    start: int
    state: int
    window: int
    row: int
    writes: list[int]
    before: Copy | None = None
    after: Copy | None = None


def begin_step(config: Config, request: Request, num_tokens: int) -> Step:
    """Finds where a step of `num_tokens`, drafts included, reads and writes. It moves the running column."""
    old, last = request.running, request.accepted - 1
    new = (request.computed + num_tokens - 1) // config.size  # the column of the step's last token
    block = lambda column: request.table.get(column, 0)
    writes = [block(new + t) for t in range(1 + config.drafts)]
    step = Step(request.computed, 0, 0, 0, writes)
    if old >= 0:
        step.state, step.window, step.row = block(old + last), block(old), last
        if config.policy == "pre_copy" and old != new:
            # The states are moved to the new running column, as if one token had been accepted there.
            step.before = Copy(step.state, step.window, step.row, writes[0])
            step.state, step.window, step.row = writes[0], writes[0], 0
    request.running = new
    return step


def finish_step(config: Config, request: Request, step: Step, num_tokens: int, drafts: int, sampled: int) -> bool:
    """Records how many tokens were accepted, the bonus token included. Returns whether a boundary's state was left.

    It plans the boundary save. The step has left a state after each token from `certain` on. If the last boundary is one of
    them, its state is `offset` columns to the right of the running one, and must go to the boundary's own column. Often it
    is there already, and always without drafts.
    """
    certain, accepted = step.start + num_tokens - drafts, max(sampled, 1)
    request.computed = certain + accepted - 1  # the bonus token has no state yet
    boundary = request.computed // config.size * config.size
    offset, target = boundary - certain, boundary // config.size - 1
    if offset >= 0:
        block = request.table
        step.after = Copy(block[request.running + offset], block[request.running], offset, block[target])
        if target == request.running:
            accepted = 1  # the newest state is at the first place of the running column now
    request.accepted = accepted
    return offset >= 0


class Pool:
    """The blocks of one layer. "?" is a row of a window that means nothing, and "." an input before the first token."""

    def __init__(self, config: Config, num_blocks: int) -> None:
        self.width, self.rows = config.width, config.width - 1 + config.drafts
        self.states: list[str] = ["?"] * num_blocks
        self.windows: list[str] = ["?" * self.rows] * num_blocks

    def copy(self, copy: Copy | None) -> None:
        """Does what `state_copy` does."""
        if copy is not None:
            self.states[copy.to] = self.states[copy.state]
            self.windows[copy.to] = self.windows[copy.window][copy.row :] + "?" * copy.row

    def forward(self, step: Step, tokens: str, is_verify: bool) -> tuple[str, str]:
        """Does what a layer does: reads, runs the tokens and writes. Returns the state and the window that it read.

        A verify row leaves a state after each token. A prompt chunk leaves one, after its last token.
        """
        state, window = "", "." * (self.width - 1)
        if step.state:
            state = self.states[step.state]
            window = self.windows[step.window][step.row : step.row + self.width - 1]
        if is_verify:
            for t in range(len(tokens)):
                self.states[step.writes[t]] = state + tokens[: t + 1]
            inputs = window[1:] + tokens
        else:
            self.states[step.writes[0]] = state + tokens
            inputs = (window + tokens)[len(tokens) :]
        self.windows[step.writes[0]] = inputs.ljust(self.rows, "?")
        return state, window


class Server:
    """The host: it gives columns their blocks, keeps the states at boundaries, and finds them again."""

    def __init__(self, config: Config, num_blocks: int) -> None:
        self.config, self.pool = config, Pool(config, num_blocks)
        self.unused, self.holders = list(range(1, num_blocks)), Counter[int]()
        self.cached: dict[str, int] = {}  # the block of each prefix, the oldest first

    def enter(self, prompt: str) -> Request:
        """Starts a request from the longest cached prefix that leaves one token to compute. It shares that block."""
        size = self.config.size
        for end in range((len(prompt) - 1) // size * size, 0, -size):
            if prompt[:end] in self.cached:
                column, block = end // size - 1, self.cached[prompt[:end]]
                self.holders[block] += 1
                return Request(prompt[:end], end, 1, column, {column: block})
        return Request()

    def run(self, request: Request, tokens: str, drafts: int = -1, sampled: int = 1) -> Step:
        """Runs a step: a prompt chunk if `drafts` is -1, else a verify row with `drafts` drafts at its end."""
        config, size, is_verify = self.config, self.config.size, drafts >= 0
        drafts, was = max(drafts, 0), request.tokens
        last = (request.computed + len(tokens) - 1) // size
        # A row with drafts writes a column per draft too. A boundary's state may go to the column before the running one,
        # which has its block since an earlier step.
        for column in range(last, last + 1 + (config.drafts if drafts else 0)):
            if column not in request.table:
                request.table[column] = self._new_block()
        step = begin_step(config, request, len(tokens))
        self.pool.copy(step.before)
        assert self.pool.forward(step, tokens, is_verify) == (was, self._window(was))
        has_boundary = finish_step(config, request, step, len(tokens), drafts, sampled)
        self.pool.copy(step.after)
        request.tokens = (was + tokens)[: request.computed]
        if has_boundary:
            boundary = request.computed // size * size
            block = request.table[boundary // size - 1]
            assert self.pool.states[block] == request.tokens[:boundary]
            assert self.pool.windows[block].startswith(self._window(request.tokens[:boundary]))
            self.cached.setdefault(request.tokens[:boundary], block)
        # The columns before this step's first token are full, and this step was the last one that could read them.
        for column in [column for column in request.table if column < step.start // size]:
            self._release(request.table.pop(column))
        return step

    def leave(self, request: Request) -> None:
        """Releases the blocks of a request. Those that are cached can be found until they are needed."""
        for block in request.table.values():
            self._release(block)
        request.table.clear()

    def _window(self, tokens: str) -> str:
        return ("." * (self.config.width - 1) + tokens)[len(tokens) :]

    def _new_block(self) -> int:
        if not self.unused:  # Evicts the oldest cached state that no request holds.
            prefix = next(prefix for prefix, block in self.cached.items() if not self.holders[block])
            self.unused.append(self.cached.pop(prefix))
        block = self.unused.pop()
        self.holders[block] += 1
        self.pool.states[block], self.pool.windows[block] = "?", "?" * self.pool.rows
        return block

    def _release(self, block: int) -> None:
        self.holders[block] -= 1
        if not self.holders[block] and block not in self.cached.values():
            self.unused.append(block)


def main() -> None:
    """Runs two requests and prints each step: what it read and wrote, and which boundary it saved."""
    server = Server(Config(), num_blocks=12)

    def show(request: Request, tokens: str, drafts: int = -1, sampled: int = 1) -> None:
        step = server.run(request, tokens, drafts, sampled)
        columns = {column: server.pool.states[block] for column, block in sorted(request.table.items())}
        saved = " and saves a boundary" if step.after and step.after.state != step.after.to else ""
        kind = "a chunk" if drafts < 0 else f"{drafts} drafts, {sampled} accepted"
        print(f"{tokens!r} ({kind}) reads block {step.state}{saved}. Columns: {columns}")

    a = server.enter("the state")
    for chunk in ("the ", "stat", "e"):
        show(a, chunk)
    show(a, " is", drafts=2, sampled=1)  # the model chose "a" after " ", so both drafts are taken back
    show(a, "at ", drafts=2, sampled=3)  # both drafts were right, and the first one passed a boundary
    server.leave(a)
    b = server.enter("the state at once")
    print(f"the second request starts after {b.tokens!r}")
    show(b, " onc")


if __name__ == "__main__":
    main()
