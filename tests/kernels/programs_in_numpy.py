"""Runs all programs of product_chain's launch for several tokens in NumPy, all threads of a program at once.

Each program is a Python thread, so programs wait for each other as they do on a GPU. One runs at a time, until it waits. If
many compiled the same operation of JAX at once, one might read what another one has half written to JAX's cache. What
fetches weights runs before what multiplies by them, with a place in shared memory for each group. So this shows that a
kernel's logic is right: what is fetched, multiplied, sent and received. It does not show that places are used again at the
right time.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from kernels.threads_in_numpy import THREADS, Ref, Threads, fake, install, value

from pallas_kernels.product_chain import _few_tokens, _fragments, _messages, _residual_stream
from pallas_kernels.product_chain._schedule import TOKENS_ROWS, WIDTH, schedule_of_tokens
from pallas_kernels.product_chain._steps import gated_norm_of, norms_of, weights_of

PATIENCE = 60  # seconds after which programs that wait for each other have failed


class Programs(Threads):
    """What all programs share: the memory over which they tell each other."""

    def __init__(self):
        super().__init__()
        self.changed, self.has_failed = threading.Condition(), False

    def arrived(self, _asked, places, kind):
        """Waits until none of the numbers is +0. Other programs run meanwhile."""
        deadline = time.monotonic() + PATIENCE

        def read(place):
            ref, index, pack = place
            return ref.array[index[:, None] + np.arange(pack)]

        asked = [(*place, pack) for place, pack in zip(places, _asked, strict=True)]
        while not all((read(place).view(np.int32) != 0).all() for place in asked):
            assert not self.has_failed, "another program has failed"
            assert time.monotonic() < deadline, "a program waits for what nobody sends"
            self.changed.wait(0.5)
        found = [read(place).view(kind) for place in asked]
        return [[value(numbers[:, n]) for n in range(numbers.shape[1])] for numbers in found]

    def store(self, place, numbers):
        """Sends numbers, +0 as -0. What is there already must be the same."""
        (ref, index), here = place, self.mask()
        words = ref.array.view(np.int32)
        for n, number in enumerate(numbers):
            bits = np.broadcast_to(np.asarray(number), THREADS).astype(np.asarray(number).dtype).view(np.int32)
            bits = np.where(bits == 0, np.int32(-(2**31)), bits)[here]
            before = words[index[here] + n]
            assert ((before == 0) | (before == bits)).all(), "a number is sent twice"
            words[index[here] + n] = bits
        self.changed.notify_all()


def _fake(programs):
    """Returns what stands for `pm`, and the operations."""

    def copy_in(source, target, _):
        assert source.shape == target.shape
        target.array[...] = source.array

    nothing = lambda *arguments, **options: None
    pm, operations = fake(programs)
    vars(pm).update(
        WARPGROUP="warpgroup",
        axis_index=lambda name: jnp.int32(getattr(programs.local, name)),
        slice_of=lambda start, size: slice(int(start), int(start) + size),
        when=lambda condition: lambda body: body() if condition else None,
        copy_in=copy_in,
        **dict.fromkeys(("wait", "arrive", "set_max_registers", "finish_together"), nothing),
    )
    return pm, operations


def run(monkeypatch, x, steps, residual, parts, number_of_programs):
    """Returns what the last step computes, a list of parts or [shares, tokens, outputs], and the residual stream."""
    programs = Programs()
    pm, operations = _fake(programs)
    install(monkeypatch, programs, pm, operations, (_few_tokens, _fragments, _residual_stream))
    for name in ("listen", "tell_once"):
        monkeypatch.setattr(_messages, name, lambda *_: None)
    monkeypatch.setattr(_messages, "ask", lambda places, pack, _: [pack] * len(places))
    monkeypatch.setattr(_messages, "arrived", programs.arrived)
    monkeypatch.setattr(_messages, "store", programs.store)
    tokens = x.shape[0]
    weights = [np.asarray(weight) for weight in weights_of(steps)]
    dtype = weights[0].dtype
    norms, gated = norms_of(steps), gated_norm_of(steps)
    plan = schedule_of_tokens(steps, parts, 2)
    groups = sum(phase.blocks * phase.terms * phase.pieces // phase.group for phase in plan.phases)
    plan = plan._replace(slots=groups + 1, depth=2)
    flat = lambda array: Ref(np.asarray(array).reshape(-1).copy())
    last = plan.phases[-1]
    sizes = [tokens * part for part in parts] if parts else [last.shares * tokens * last.outputs]
    out = [Ref(np.full(size, np.nan, dtype if parts else np.float32)) for size in sizes]
    out += [Ref(np.full(residual.size, np.nan, residual.dtype))] if norms else []
    sent = _few_tokens.places(plan, tokens)[-1].end
    shared = dict(
        x=flat(x),
        weights=[Ref(weight.reshape(len(weight), -1, WIDTH)) for weight in weights],
        norms=[flat(norm.weight) for norm in norms],
        residual=[] if residual is None else [flat(residual)],
        gated=None if gated is None else [flat(gated.gate), flat(np.asarray(gated.weight, np.float32))],
        sent=Ref(np.zeros(sent, np.float32)),
        counters=Ref(np.zeros(2 * len(plan.phases), np.int32)),
        out=out,
    )
    largest = TOKENS_ROWS * WIDTH * max(phase.group for phase in plan.phases)

    def program(number):
        dirty = lambda *shape: Ref(np.full(shape, np.nan, np.float32))
        own = dict(partials=dirty(32768), staging=dirty(4096), factors=dirty(max(len(norms), 1), 16))
        refs = SimpleNamespace(**shared, **own, blocks=Ref(np.full((plan.slots, largest), np.nan, dtype)))
        refs.full = refs.free = Ref(np.zeros(plan.slots))
        refs.done = None
        programs.local.program = number
        try:
            with programs.changed, jax.disable_jit():
                for warpgroup in (_fragments.WARPGROUPS, 0):
                    programs.local.warpgroup = warpgroup
                    _few_tokens._run(refs, plan, gated, norms, parts, dtype, number_of_programs, tokens)
        except BaseException:
            programs.has_failed = True
            raise

    with ThreadPoolExecutor(number_of_programs) as pool:
        list(pool.map(program, range(number_of_programs)))
    results = [ref.array.reshape(tokens, -1) for ref in out[: len(parts)]] if parts else None
    if results is None:
        results = out[0].array.reshape(last.shares, tokens, last.outputs)
    return results, None if residual is None else out[-1].array.reshape(tokens, -1)
