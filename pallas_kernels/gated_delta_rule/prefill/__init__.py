"""gated_delta_rule's prefill as three Pallas kernels.

The first two kernels run all chunks at once, and the third carries the states from chunk to chunk.

For one head and chunk, let S be the state before the chunk, and let L be the lower triangular matrix of the decayed
products of each key with the earlier keys, times beta. With T = (I + L)^-1, the tokens add T beta (v - decay k S) to
the state (the UT transform).

    chunk_intra.py    one program per chunk and head: L, the decayed products of queries with keys, and the decays
    solve_tril.py     one program per chunk and head: T beta
    chunk_states.py   one program per row, head and tile of value dims: runs the row's chunks, with S in registers

On Hopper GPUs sm90.py runs other kernels for bfloat16 inputs, whose stages have flash-linear-attention's names:

    cumsum_sm90.py                    the running sums of a chunk's log decays
    gram_sm90.py                      the decayed Gram matrices K K^T and Q K^T of a chunk
    solve_tril_sm90.py                T beta, the inverse of which the WY representation is made
    chunk_intra_sm90.py               all three for a chunk and key head, with a decay per head
    chunk_intra_per_channel_sm90.py   the same with a decay per key channel
    chunk_states_64_sm90.py           the recurrence from chunk to chunk, and outputs: 64 value dims per CTA
    chunk_states_128_sm90.py          the same bits with 128 value dims per CTA, for much work in many rows
    head_sm90.py                      the copies and products of one head in both variants of the recurrence
    variants_sm90.py                  which of the two variants a launch runs
    work_queue_sm90.py                the heads that CTAs take one after the other
    per_head_sm90.py                  the launch of all stages with a decay per head

Only the third kernel touches the pool. bfloat16 inputs are multiplied as they are, with float32 values that are split
into bfloat16 terms (see `PrefillConfig`). Other inputs are multiplied as float32, in three products of tf32.
"""
