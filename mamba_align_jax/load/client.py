"""Sends a workload's sessions to an engine and records when each token arrives.

Times are seconds since the load began. A request arrives when it is due, so the time that it waits for the engine counts.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.running.engine import Engine
from mamba_align_jax.engine.scheduling.request import RequestOutput
from mamba_align_jax.load.workloads import Agents, Loop, Session, Tokens


@dataclass(frozen=True)
class Served:
    """One finished request.

    Attributes:
        prompt: The tokens of its prompt.
        tokens: The generated tokens.
        num_cached_tokens: How many tokens of the prompt came from the cache.
        arrival: When the request was due.
        admitted: When the step began in which it was first admitted.
        times: When each generated token arrived.
    """

    prompt: Tokens
    tokens: Tokens
    num_cached_tokens: int
    arrival: float
    admitted: float
    times: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """The seconds from arrival to the first token."""
        return self.times[0] - self.arrival

    @property
    def tpot(self) -> float:
        """The mean seconds per token after the first; 0 if there is only one token."""
        return (self.times[-1] - self.times[0]) / max(len(self.times) - 1, 1)

    @property
    def itl(self) -> list[float]:
        """The seconds between deliveries of tokens. All tokens of one step arrive together, as one delivery."""
        return [later - earlier for earlier, later in itertools.pairwise(self.times) if later > earlier]

    @property
    def e2e(self) -> float:
        """The seconds from arrival to the last token."""
        return self.times[-1] - self.arrival


@dataclass(frozen=True)
class Run:
    """A load that was served.

    Attributes:
        requests: The finished requests, in the order in which they finished.
        seconds: How long the whole load took.
        calls: How long each call of `Engine.step` took, in seconds.
    """

    requests: list[Served]
    seconds: float
    calls: list[float]


@dataclass
class _Turn:
    """A request that is not finished. `arrival` is when it was due, `sent` is when the engine received it."""

    session: Session
    number: int
    arrival: float
    sent: float
    admitted: float | None = None


def serve(engine: Engine, sessions: Sequence[Session], output: int, loop: Loop, *, agents: Agents | None = None) -> Run:
    """Sends the sessions when the loop says, and steps the engine until all of them are served.

    The next turn of a session is sent when the previous one is answered. Each answer has `output` tokens: no end token
    ends it early. If the sessions are those of `agents`, prompts leave out the reasoning of earlier turns, and ask for
    states where later prompts will part from them. The engine has compiled its programs and has no requests. The error of
    a step that fails is raised.
    """
    begin = time.perf_counter()
    now = lambda: time.perf_counter() - begin
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    waiting = deque(zip(loop.due(len(sessions)), sessions, strict=True))
    live: dict[int, _Turn] = {}
    served: list[Served] = []
    calls: list[float] = []

    def send(session: Session, number: int, arrival: float, history: Tokens = ()) -> None:
        prompt = history + session[number]
        own = replace(params, checkpoint_at=(agents.tools, len(prompt))) if agents else params
        request = engine.add_request(prompt, own)
        live[request] = _Turn(session, number, arrival, now())

    while waiting or live:
        while waiting and waiting[0][0] <= now():
            arrival, session = waiting.popleft()
            send(session, 0, arrival)
        if not live:
            time.sleep(max(0.0, waiting[0][0] - now()))
            continue
        start = now()
        outputs = engine.step()
        calls.append(now() - start)
        error = next((output.error for output in outputs if output.error is not None), None)
        if error is not None:
            raise error
        for request in [request.id for request in engine.scheduler.running] + [out.request_id for out in outputs]:
            if live[request].admitted is None:
                live[request].admitted = start
        for finished in outputs:
            turn = live.pop(finished.request_id)
            served.append(_served(turn, finished))
            if turn.number + 1 < len(turn.session):
                said = finished.token_ids[agents.reasoning if agents else 0 :]
                send(turn.session, turn.number + 1, now(), finished.prompt_token_ids + said)
            elif waiting and waiting[0][0] == math.inf:
                send(waiting.popleft()[1], 0, now())
    return Run(served, now(), calls)


def _served(turn: _Turn, output: RequestOutput) -> Served:
    assert turn.admitted is not None
    times = tuple(turn.sent + seconds for seconds in output.token_times)
    cached = output.num_cached_tokens
    return Served(output.prompt_token_ids, output.token_ids, cached, turn.arrival, turn.admitted, times)
