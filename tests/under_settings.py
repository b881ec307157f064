"""Runs one case of each op, an engine and the foreign step, and writes down what they compute.

`python tests/under_settings.py '{"jax_enable_x64": true}' FILE PART ...` runs in a process of its own whose JAX has these
settings from the start, as a program that imports this library may have them. FILE gets the results of each part by name.
"""

import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

GUARD = "jax_transfer_guard"  # holds from when an engine is warm: JAX itself can't make an array of zeros under it


def run_ops(implementation):
    """Runs every op once, and returns a tree of results."""
    import pallas_kernels as pk
    from benchmarks.workloads.product_chain import Case

    rng, HEADS, DIM = np.random.default_rng(0), 2, 16
    CHANNELS = 3 * HEADS * DIM
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    ints = lambda *values: jnp.asarray(values, jnp.int32)
    x, weight, loc = array(6, CHANNELS), array(4, CHANNELS), ints(0, 1, 6)
    conv, recurrent = array(1, 6, 5, CHANNELS), array(1, 6, HEADS, DIM, DIM)
    a, b, A_log, dt_bias = array(6, HEADS), array(6, HEADS), array(HEADS), array(HEADS)
    how = dict(implementation="triton", interpret=True) if implementation == "interpret" else {}
    run = pk.Run(**how)
    q, k, v = jnp.split(x.reshape(6, 3 * HEADS, DIM), 3, axis=1)
    g, beta = pk.gated_delta_rule_gates(a, b, A_log, dt_bias)
    rates = -jnp.abs(recurrent[0, 0])
    chunks = pk.chunk_rows(loc, ints(3, 0), 6, 16)  # short chunks make small programs
    rows = pk.Rows(
        query_start_loc=loc,
        layer=0,
        num_computed_tokens=ints(17, 14),  # a row folds, and one crosses a group's end
        read=ints(1, 0),
        window_read=ints(1, 0),
        window_row=ints(1, 0),
        write=jnp.pad(ints(2, 3)[:, None], ((0, 0), (0, 4))),
        fold=pk.Fold(slot=ints(0, 1), base=ints(3, 0), block=ints(2, 3)),
        chunks=chunks,
        max_query_tokens=5,
    )
    short = dataclasses.replace(rows, query_start_loc=ints(0, 1, 3))
    kept = pk.RowCheckpoints(offset=ints(1, 0)[:, None], block=ints(4, 0)[:, None])
    of_prompts = dataclasses.replace(rows, checkpoints=kept)
    of_windows = dataclasses.replace(
        rows, checkpoints=pk.RowCheckpoints(offset=ints(0, 3)[:, None], block=ints(0, 4)[:, None])
    )
    narrow = lambda *arrays: [x.astype(jnp.bfloat16) for x in arrays]
    k_and_u, decays = [array(1, 2, HEADS, 32, DIM) for _ in range(2)], -jnp.abs(array(1, 2, HEADS, 32))
    ring = pk.DeltaRuleEntries(k=k_and_u[0], u=k_and_u[1], g=decays)
    of_mamba = pk.Mamba2Entries(
        array(1, 2, HEADS, 32, DIM),
        array(1, 2, 1, 32, DIM),
        *(-jnp.abs(array(1, 2, HEADS, 32)) for _ in range(2)),
    )
    pages = array(1, 6, 4, HEADS, DIM)
    table = ints(1, 2, 3, 4, 5, 0).reshape(2, 3).repeat(2, axis=1)
    verify = dataclasses.replace(rows, num_computed_tokens=ints(3, 9))
    prompts = dataclasses.replace(verify, max_query_tokens=None)
    indices = pk.PageIndices(layer=0, page=ints(*range(6)), offset=ints(0, 1, 2, 3, 0, 1))
    up, down, logits = array(5, 2 * DIM, CHANNELS), array(5, CHANNELS, DIM), array(2, 6, 4)
    chosen, shares = pk.choose_experts(logits, pk.Routing(top_k=2), bias=array(4), run=run)
    chain = Case("any", ("norm", ("gated", 32), 24), 16, parts=(8, 16), dtype="float32")
    made = chain.arguments(lambda shape, dtype, deviation: (deviation * array(*shape)).astype(dtype), tokens=2)
    weights = jnp.exp(-jnp.abs(array(3, 100)))
    found = dict(
        state_copy=pk.state_copy(recurrent, ints(1, 2), ints(3, 4), run=run),
        state_copy_of_windows=pk.state_copy(conv, ints(1, 2), ints(3, 2), ints(1, 2), run=run),
        causal_conv1d_update=pk.causal_conv1d_update(x[:3], conv, weight, None, short, run=run),
        causal_conv1d_prefill=pk.causal_conv1d_prefill(x, conv, weight, None, of_windows, run=run),
        gated_delta_rule_update=pk.gated_delta_rule_update(x, a, b, A_log, dt_bias, recurrent, rows, run=run),
        gated_delta_rule_recurrent=pk.gated_delta_rule_recurrent(q, k, v, -jnp.abs(k), beta, recurrent, rows, run=run),
        gated_delta_rule_deferred=pk.gated_delta_rule_deferred(x, a, b, A_log, dt_bias, recurrent, ring, rows, run=run),
        gated_delta_rule_prefill=pk.gated_delta_rule_prefill(*narrow(q, k, v), g, beta, recurrent, of_prompts, run=run),
        gated_delta_rule_prefill_per_channel=pk.gated_delta_rule_prefill(
            q, k, v, -jnp.abs(k), beta, recurrent, of_prompts, run=run
        ),
        selective_state_update=pk.selective_state_update(
            v, a, -jnp.exp(A_log), q, k, recurrent, rows, D=dt_bias, z=k, dt_bias=dt_bias, run=run
        ),
        selective_state_deferred=pk.selective_state_deferred(
            x[:, : 4 * DIM], a, -jnp.exp(A_log), recurrent, of_mamba, rows, D=dt_bias, run=run
        ),
        ssd=pk.ssd(
            *narrow(v, a), -jnp.exp(A_log), *narrow(q, k), recurrent, of_prompts, D=dt_bias, z=narrow(k)[0], run=run
        ),
        selective_scan=pk.selective_scan(v, k, rates, q, k, recurrent, rows, D=k[1], z=k, run=run),
        paged_attention=pk.paged_attention(q, pages, pages, verify, table, run=run),
        paged_attention_bfloat16=pk.paged_attention(*narrow(q, pages, pages), prompts, table, run=run),
        rotate_and_store=pk.rotate_and_store(
            *(q, k, v, a, b, pages, pages, indices, pk.HeadNorms(q_weight=q[0, 0], k_weight=k[0, 0])), run=run
        ),
        rotate=pk.rotate(q, a, b),
        linear=pk.linear(a, b, a[:, 0], parts=(2, 4), run=run),
        linear_gated=pk.linear(*narrow(a, b), is_gated=True, run=run),
        linear_sums=pk.linear_sums(a, b, run=run),
        add_rms_norm=pk.add_rms_norm(a, b[None], A_log, epsilon=1e-6, run=run),
        choose_experts=(chosen, shares),
        mixture_of_experts=pk.mixture_of_experts(x, up, down, chosen, shares, run=run),
        mixture_of_experts_sums=pk.mixture_of_experts_sums(x, up, down, chosen, shares, run=run),
        routed_experts_sums=pk.routed_experts_sums(
            x[:1], logits[:, :1], up[:5], down[:5], pk.Routing(top_k=2, shared=1), run=run
        ),
        least_kept=pk.least_kept(weights / weights.max(1, keepdims=True), ints(0, 3, 50), array(3) * 0 + 0.7, run=run),
    )
    if implementation is None:  # no kernel of these is interpreted
        found["product_chain"] = pk.product_chain(*made, parts=chain.parts)
        found["all_reduce"] = run_all_reduce(array(6, CHANNELS), array(2, 6, CHANNELS), array(CHANNELS))
    return found


def run_all_reduce(x, addend, weight):
    """Runs the ops over the one device of a mesh, which has no mailboxes to write to."""
    import pallas_kernels as pk

    mesh, every = jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec()
    memory, addresses = jnp.zeros((1, 4 * 2**16), jnp.int32), jnp.zeros((1, 2, 2), jnp.int32)
    boxes = pk.Mailboxes(memory=memory, addresses=addresses, capacity=2**16, axis="x")

    def run(x, addend, weight, boxes, epoch):
        total, epoch = pk.all_reduce(addend, boxes, epoch)
        return total, *pk.all_reduce_rms_norm(x, addend, weight, boxes, epoch, epsilon=1e-6)

    over_devices = jax.shard_map(run, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)
    return jax.jit(over_devices)(x, addend, weight, boxes, jnp.int32(1))


def lower_ops():
    """Lowers the first case of each op for a GPU, and returns nothing."""
    from kernels.lowered_cases import EVERY

    for lower, _, case in EVERY.values():
        assert "__gpu$xla.gpu.triton" in lower("NVIDIA H200", case)
    return {}


def make_engine(speculation):
    """Returns an engine of two layers of the bundled model, and how its requests are sampled, each in another way."""
    from fakes.engines import load_two_layers

    from mamba_align_jax import Engine, EngineConfig, SamplingParams
    from mamba_align_jax.data import BYTE_MODEL

    sizes = dict(block_size=8, kv_page_size=8, max_num_seqs=5, max_num_batched_tokens=32, max_model_len=64)
    drafts = {} if speculation == "none" else dict(num_speculative_tokens=2, speculation=speculation)
    config = EngineConfig(num_state_blocks=40, num_kv_pages=40, **sizes, **drafts)
    asks = (
        dict(),
        dict(temperature=1.0, seed=3, top_k=20, top_p=0.9),
        dict(temperature=1.0, seed=4, min_p=0.01, frequency_penalty=0.5, repetition_penalty=1.2),
        dict(logprobs=2, logit_bias={101: 1.0}),
        dict(prompt_logprobs=1, presence_penalty=1.0, min_tokens=3),
    )
    return Engine(load_two_layers(BYTE_MODEL), config), [
        SamplingParams(max_tokens=8, ignore_eos=True, **a) for a in asks
    ]


def run_engine(speculation):
    """Serves requests of every kind side by side, under a transfer guard if there is to be one."""
    from mamba_align_jax.data import encode
    from mamba_align_jax.engine.device.runner import StepRunner
    from mamba_align_jax.engine.scheduling.buckets import Bucket

    # All steps pad to one program, because compiling takes longer than running.
    sizes = lambda self: (self.align.max_num_seqs, self.max_prefill_rows, self.max_num_batched_tokens)
    StepRunner.buckets = property(lambda self: [Bucket(*sizes(self))])
    engine, params = make_engine(speculation)
    prompts = [encode(f"{number}) a list of a list of a list") for number in range(len(params))]

    def serve():
        outputs = engine.generate(prompts, params)
        return outputs, engine.generate([[*outputs[0].prompt_token_ids, *outputs[0].token_ids]], [params[1]])

    serve()  # compiles
    engine.reset_prefix_cache()
    with jax.transfer_guard(SETTINGS.get(GUARD, "allow")):
        outputs, again = serve()
    assert again[0].num_cached_tokens > 0
    assert engine.stats.null_reads == 0
    tokens = [np.array(output.token_ids) for output in [*outputs, *again]]
    scores = [[each.logprob for each in outputs[3].logprobs], [each.logprob for each in outputs[4].prompt_logprobs[1:]]]
    return dict(tokens=tokens, scores=[np.array(values, np.float32) for values in scores])


def run_foreign_step():
    """Runs the example, whose outputs are in what it prints to so many digits as are sure."""
    from examples import foreign_step

    run = foreign_step.Server.run

    @functools.wraps(run)
    def guarded(*arguments, **options):
        with jax.transfer_guard(SETTINGS.get(GUARD, "allow")):
            return run(*arguments, **options)

    foreign_step.Server.run = guarded
    foreign_step.main()
    return {}


PARTS = {
    "ops": functools.partial(run_ops, None),
    "interpreted ops": functools.partial(run_ops, "interpret"),
    "lowered ops": lower_ops,
    **{f"engine {drafts}": functools.partial(run_engine, drafts) for drafts in ("none", "prompt_lookup", "mtp")},
    "foreign step": run_foreign_step,
}


def main(settings, file, *parts):
    SETTINGS.update(json.loads(settings))
    for name, value in SETTINGS.items():
        if name != GUARD:
            jax.config.update(name, value)
    found = {}
    for part in parts:
        leaves = jax.tree_util.tree_leaves_with_path(PARTS[part]())
        # NumPy's files know no bfloat16.
        found |= {
            f"{part}{jax.tree_util.keystr(path)} {leaf.dtype}": np.asarray(leaf).view(f"u{leaf.dtype.itemsize}")
            for path, leaf in leaves
        }
    np.savez(file, **found)


SETTINGS = {}
if __name__ == "__main__":
    main(*sys.argv[1:])
