"""Runs the body of a Mosaic GPU kernel of one warpgroup in NumPy, one program after the other.

JAX's interpreter knows no operands in registers and no shared memory that is seen in two ways. This shows that a kernel's
logic is right. It does not show that copies and barriers are in the right places: what shares memory on a GPU is apart here.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from kernels import threads_in_numpy

from pallas_kernels.gated_delta_rule.prefill import cumsum_sm90, gram_sm90


class Slice:
    """A slice of fixed length that may start at a traced number."""

    def __init__(self, start, size):
        self.start, self.size = start, size


class Ref:
    """An array in memory, or a view of one, with the interface of Pallas' refs."""

    def __init__(self, array):
        self.array = array

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)
    T = property(lambda self: Ref(self.array.T))
    at = property(lambda self: _At(self.array))

    def __getitem__(self, index):
        return jnp.asarray(self.array[_plain(index)])

    def __setitem__(self, index, values):
        self.array[_plain(index)] = np.asarray(values)


class _At:
    def __init__(self, array):
        self.array = array

    def __getitem__(self, index):
        return Ref(self.array[_plain(index)])


def _plain(index):
    """Returns an index that NumPy knows. A slice may reach beyond the end."""
    convert = lambda x: slice(int(x.start), int(x.start) + x.size) if isinstance(x, Slice) else x
    index = [convert(x) for x in (index if isinstance(index, tuple) else (index,))]
    return tuple(x if isinstance(x, slice) or x is Ellipsis else int(x) for x in index)


def memory(dtype, *shape):
    """Memory that holds NaN."""
    return Ref(np.full(shape, np.nan, dtype))


class _Lax:
    """jax.lax, whose loops and conditionals are Python's."""

    def __getattr__(self, name):
        return getattr(jax.lax, name)

    def fori_loop(self, start, stop, body, carry):
        for n in range(int(start), int(stop)):
            carry = body(jnp.int32(n), carry)
        return carry

    def cond(self, condition, then, otherwise):
        return then() if bool(condition) else otherwise()

    def while_loop(self, condition, body, carry):
        while condition(carry):
            carry = body(carry)
        return carry


class _Jax:
    """jax with such loops and conditionals."""

    lax = _Lax()

    def __getattr__(self, name):
        return getattr(jax, name)


def loops_of_python():
    """Returns JAX with loops and conditionals that are Python's."""
    return _Jax()


def _copy_in(source, target, _):
    """Copies what there is of the source. The rest becomes 0, as on a GPU."""
    target.array[...] = 0
    target.array[tuple(map(slice, source.shape))] = source.array


def _copy_out(source, target):
    target.array[...] = source.array


def _multiply_all(shape, sums, meanwhile=lambda: None):
    others = meanwhile() or ()
    operand = lambda x: np.asarray(x.array if isinstance(x, Ref) else x, np.float32)
    left = lambda x: operand(x() if callable(x) else x)
    zero = np.zeros(shape, np.float32)
    return [*(jnp.asarray(sum((left(a) @ operand(b) for a, b in pairs), zero)) for pairs in sums), *others]


def _keep_rows(tile, count):
    tile.array[int(count) :] = 0


def _solve_tril(system, beta, solution):
    """Does what solve_tril_sm90.py does, in float64."""
    for half in range(system.shape[0]):
        inverse = np.linalg.inv(np.eye(system.shape[1]) - np.tril(system.array[half].astype(np.float64), -1))
        rest = (inverse * beta.array[half]).astype(np.float32)
        for piece in range(solution.shape[1]):
            is_last = piece == solution.shape[1] - 1
            part = rest if is_last else (rest.view(np.int32) & np.int32(-65536)).view(np.float32)
            solution.array[half, piece] = part.T.astype(solution.dtype)
            rest = rest - part


def _threads_run(function):
    """Returns a function of cumsum_sm90.py, which runs for all threads, for the refs and numbers of this file."""

    def run(*arguments):
        of = lambda x: threads_in_numpy.Ref(x.array) if isinstance(x, Ref) else x
        return function(*map(of, arguments))

    return run


def _find_norms(products, norms, factor):
    """Runs `gram_sm90.find_norms` for all threads."""
    held = None if products is None else threads_in_numpy.held_tile(products)
    gram_sm90.find_norms(held, threads_in_numpy.Ref(norms.array), factor)


def _decayed_gram(keys, queries, per_row, per_column, norms, system, attention):
    """Runs `gram_sm90.decayed_gram` for all threads."""
    products = map(threads_in_numpy.held_tile, (keys, queries))
    vectors = (threads_in_numpy.Ref(x.array) for x in (per_row, per_column, norms))
    tiles = [threads_in_numpy.Ref(threads_in_numpy.tiled(x.array)) for x in (system, attention)]
    gram_sm90.decayed_gram(*products, *vectors, *tiles)
    for target, tile in zip((system, attention), tiles, strict=True):
        target.array[...] = threads_in_numpy.untiled(tile.array)


def loop(start, stop):
    """Does what `hp.loop` does."""

    def run(body):
        for n in range(int(start), int(stop)):
            body(jnp.int32(n))

    return run


def when(condition):
    """Does what `hp.when` does."""
    return lambda body: body() if bool(condition) else None


def patch(monkeypatch, module):
    """Makes `module`, which has a kernel, run in NumPy. Returns a dict: the number of a program along each axis."""
    program, ignored = {}, lambda *_, **__: None
    read = lambda ref: jnp.asarray(ref.array)
    number = lambda shape, axis: jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    fake = dict(
        axis_index=lambda name: jnp.int32(program[name]),
        rows=lambda shape: number(shape, 0),
        columns=lambda shape: number(shape, 1),
        zeros=jnp.zeros,
        zeros_per_row=lambda rows, dtype: jnp.zeros((rows,), dtype),
        ds=Slice,
        along_rows=lambda x, count: jnp.broadcast_to(x[:, None], (*x.shape, count)),
        along_columns=lambda x, rows: jnp.broadcast_to(x[None], (rows, *x.shape)),
        copy_gmem_to_smem=_copy_in,
        copy_smem_to_gmem=_copy_out,
        multiply_all=_multiply_all,
        optimization_barrier=lambda x: x,
        when=when,
        loop=loop,
        **dict.fromkeys(("load_tile", "load_gmem_tile", "load_per_row", "load_per_column"), read),
        **dict.fromkeys(("barrier_wait", "commit_smem", "wait_smem_to_gmem"), ignored),
    )
    monkeypatch.setattr(module, "hp", SimpleNamespace(**fake))
    monkeypatch.setattr(module, "jax", loops_of_python())
    monkeypatch.setattr(module, "solve_tril", _solve_tril)
    monkeypatch.setattr(module, "keep_rows", _keep_rows)
    threads = threads_in_numpy.Threads()
    threads_in_numpy.install(monkeypatch, threads, threads_in_numpy.fake(threads), [cumsum_sm90, gram_sm90])
    for name in ("load_gates", "sum_log_decays", "scale_tokens"):
        monkeypatch.setattr(module, name, _threads_run(getattr(cumsum_sm90, name)), raising=False)
    for name, function in (("find_norms", _find_norms), ("decayed_gram", _decayed_gram)):
        monkeypatch.setattr(module, name, function, raising=False)
    return program
