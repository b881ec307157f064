"""The language of the kernels for Hopper GPUs (SM90): their whole interface to Mosaic GPU, MLIR and PTX.

Kernels `from pallas_kernels import hopper as hp` and name nothing of MLIR. JAX's bindings of it are private and change with
JAX (0.11.2 or newer is needed), so only this package may import them.

A kernel is written on two levels. On the first one a function runs once per warpgroup, 128 threads, on arrays that they
hold together, with names of Pallas (`lowering.py`, `barriers.py`, `tiles.py`): copies between GMEM and SMEM, mbarriers,
products of tiles [64 n, 8 m] on tensor cores, and `jax.numpy` for everything elementwise. On the second one, in `inline`, a
function is the code of a single thread on its registers. Its operands are

    (ref, tiling or ())       seen as a `Memory`: memory[i, j] loads an element, memory[i, j] = x stores one
    an array in registers     seen as the list of this thread's registers of it
    a scalar                  seen as a `Register`

`Register` (`registers.py`) has NumPy's operators: x + y, x * 3, x & 31, x < y, x.astype(dtype). Every operator writes one
instruction, and a Python scalar becomes a constant.

`control.py` has loops, branches and predicated blocks, `memory.py` addresses and 16-byte loads and stores, `shuffles.py` and
`tensor_cores.py` the instructions of a whole warp, `arithmetic.py` functions made of these. In the smallest kernel, 128
threads add a constant to a vector:

    def body(x_ref, out_ref):
        def of_thread(x, out):
            thread = hp.thread_index()
            out[thread] = x[thread] + 1.0

        hp.inline(of_thread, (x_ref, ()), (out_ref, ()))

    out = hp.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32), grid=(1,), grid_names=("cta",))(x)

Kernels with more arrays are started by `launch`, which gives names to all of them.

Four modules are written in the language and shared by kernels: `partial_tiles.py` (tiles that are not full),
`prefill_rows.py` (a row's chunks and checkpoints), `deferred_rows.py` (rows of deferred states) and `state_warps.py`
(states that warps advance token by token). `messages.py` sends values and signals between the CTAs of one launch.
"""

# ruff: noqa: F401, I001
# fmt: off
from pallas_kernels.hopper.arithmetic import (
    add, approximate, clamp, from_words, is_between, lane_and_warp, rounded_pair, sigmoid, silu, softplus, swizzled,
    word, words,
)
from pallas_kernels.hopper.barriers import (
    Barrier, barrier_arrive, barrier_of_warpgroups, barrier_wait, fetch_and_increment, finish_together,
    run_by_warpgroup, semaphore_signal, semaphore_wait, semaphores, wait_for_last, warp_barrier,
    WARPGROUP, warpgroup_barrier,
)
from pallas_kernels.hopper.control import (
    branch, elements, for_range, inline, predicated, strided, thread_index, thread_index_again, thread_of_cta,
)
from pallas_kernels.hopper.launch import launch
from pallas_kernels.hopper.lowering import (
    axis_index, commit_smem, copy_gmem_to_smem, copy_smem_to_gmem, ds, fast_math, keep_if, kernel, loop,
    multiple_of, optimization_barrier, RefUnion, set_max_registers, SMEM, SWIZZLE, tiled, tiling, token_tiles,
    views_of_tokens, wait_smem_to_gmem, when,
)
from pallas_kernels.hopper.memory import (
    address, advance, clear_smem_words_if, load_address, load_if, load_smem_words, load_words, load_words_if,
    long_row_address, row_address, smem_address, store_if, store_words, store_words_if, word_address,
)
from pallas_kernels.hopper.registers import (
    bitcast, broadcast, exp, exp2, f32, fma, i32, index, load_vector, maximum, Memory, minimum, pack, reduce_add,
    Register, rsqrt, select, store_vector, unpack, unsigned_less,
)
from pallas_kernels.hopper.shuffles import reduce_warp, shfl_idx, shfl_up, shfl_xor, sum_over_lanes
from pallas_kernels.hopper.tensor_cores import ldmatrix_transposed, mma, mma_tf32, stmatrix
from pallas_kernels.hopper.tiles import (
    accumulate, along_columns, along_rows, columns, load_for_each_head, load_for_each_warp, load_gmem_tile,
    load_per_column, load_per_row, load_rows_by_warp, load_spread, load_tile, load_transposed, multiply,
    multiply_all, rows, scale_rows, store_and_arrive, store_gmem, store_tiles, store_transposed, sums_of_heads,
    zeros, zeros_per_row,
)
