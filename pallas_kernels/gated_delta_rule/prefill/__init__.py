"""gated_delta_rule's prefill as three Pallas kernels.

The first two kernels run all chunks at once, and the third carries the states from chunk to chunk.

For one head and chunk, let S be the state before the chunk, and let L be the lower triangular matrix of the decayed
products of each key with the earlier keys, times beta. With T = (I + L)^-1, the tokens add T beta (v - decay k S) to
the state (the UT transform).

    products.py   one program per chunk and head: L, the decayed products of queries with keys, and the decays
    inverse.py    one program per chunk and head: T beta
    states.py     one program per row, head and tile of value dims: runs the row's chunks in order, with S in registers

On Hopper GPUs launch_mosaic.py runs other kernels for bfloat16 inputs. products_mosaic.py makes what the first two kernels
make with a decay per head, and sums_mosaic.py sums the log decays for it. products_per_channel_mosaic.py does so with a
decay per key channel, and inverse_mosaic.py inverts for both. The states are carried by states_mosaic.py, or where there is
much work in many rows by heads_mosaic.py (forms_mosaic.py chooses), and carry_mosaic.py has what both do. With a decay per
head all of it is one launch (per_head_mosaic.py); with one per key channel the states are (per_channel_mosaic.py).

Only the third kernel touches the pool. bfloat16 inputs are multiplied as they are, with float32 values that are split
into pieces of bfloat16 (see `PrefillConfig`). Other inputs are multiplied as float32, in three products of tf32.
"""
