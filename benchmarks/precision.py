"""Measures what bfloat16 costs: `python -m benchmarks.precision --json benchmarks/results/precision.jsonl`.

Each model runs the same tokens twice with the same weights: in bfloat16, as it is served, and in float32 at matmul precision
"highest". Prefill rows read the prompts and decode rows read one token at a time, teacher-forced, with the ops that the
device would use. A row says how often both runs put the same token first. Its errors are the rms of the difference of the
logits, divided by the rms of the logits. `largest_loss` is the largest amount by which a token that bfloat16 prefers lies
below the highest logit in float32, divided by the same rms. It tells near ties from errors.

Most models are random, with the head sizes of published models and few layers. Their logits are Gaussian and the two highest
of 16,384 are close together, so agreement is lower than on real text. The bundled byte-level model is trained and reads text
that it was not trained on.
"""

import argparse
import functools
import itertools
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.rows import Row, append, facts
from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.config import AlignConfig
from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.align.state import AlignState
from mamba_align_jax.align.step import begin_step, finish_step
from mamba_align_jax.align.tables import BlockTables
from mamba_align_jax.data import BYTE_MODEL, encode
from mamba_align_jax.kv import KVPages
from mamba_align_jax.metadata.step_inputs import step_inputs
from mamba_align_jax.models import ARCHITECTURES, load_model

TEXT = Path(__file__).parents[1] / "tests" / "data" / "heldout_docs.txt"
TRAINED = "bundled"
ROWS, PAGE_SIZE = 4, 16

_HYBRID = dict(layer_types=[*["linear_attention"] * 3, "full_attention"], num_attention_heads=8, num_key_value_heads=2)
_DELTA = _HYBRID | dict(head_dim=256, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=128)
_DELTA |= dict(linear_value_head_dim=128)
_EXPERTS = dict(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=512, shared_expert_intermediate_size=512)
_LATENT = dict(_HYBRID, num_key_value_heads=8, linear_num_heads=8, linear_head_dim=128, kv_lora_rank=512)
_LATENT |= dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
_LATENT |= dict(num_experts=16, num_experts_per_token=4, moe_intermediate_size=512)
_ATTENTION = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=128)
_MAMBA2 = dict(mamba_n_heads=32, mamba_d_head=64, mamba_n_groups=1)
_NEMOTRON = dict(
    hybrid_override_pattern="MEM*ME", mamba_num_heads=32, mamba_head_dim=64, ssm_state_size=128, n_groups=8
)
_NEMOTRON |= dict(n_routed_experts=16, num_experts_per_tok=4, moe_intermediate_size=512)
_GRANITE = dict(layer_types=["mamba"] * 3 + ["attention"], mamba_d_state=128, attention_multiplier=1 / 128)
_LFM2 = dict(layer_types=["conv", "conv", "full_attention", "conv"], num_attention_heads=16, num_key_value_heads=4)
# For each `model_type`, fields of config.json beside `_SIZES`.
MODELS: dict[str, Row] = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _EXPERTS,
    "qwen3_next": _DELTA | _EXPERTS,
    "olmo_hybrid": _DELTA | dict(head_dim=128, linear_key_head_dim=96, linear_value_head_dim=192),
    "kimi_linear": _LATENT,
    "bailing_hybrid": _LATENT | dict(num_expert_group=4, topk_group=2, short_conv_kernel_size=4),
    "mamba": {},
    "falcon_mamba": {},
    "mamba2": dict(num_heads=32, n_groups=1),
    "nemotron_h": _ATTENTION | _NEMOTRON | dict(moe_shared_expert_intermediate_size=1024),
    "jamba": _ATTENTION | dict(attn_layer_period=4, attn_layer_offset=2, num_experts=8),
    "granitemoehybrid": _ATTENTION | _MAMBA2 | _GRANITE,
    "bamba": _ATTENTION | _MAMBA2 | dict(attn_layer_indices=[2], mamba_d_state=128),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2 | dict(num_dense_layers=1, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=512),
    "zamba2": dict(
        num_attention_heads=16,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        n_mamba_heads=32,
        adapter_rank=64,
        use_shared_attention_adapter=True,
        use_mem_rope=True,
    ),
    "falcon_h1": _ATTENTION | _MAMBA2 | dict(mamba_d_ssm=2048, mamba_d_state=256),
}
_SIZES = dict(vocab_size=16384, hidden_size=1024, intermediate_size=2048, num_hidden_layers=4)


def configuration(name: str, dtype: str = "bfloat16") -> Any:
    """Returns the configuration of one of `MODELS`."""
    return ARCHITECTURES[name].Config.from_dict(_SIZES | MODELS[name] | {"model_type": name}, dtype)


def _random_weights(name: str, seed: int) -> Any:
    """The model's weights in bfloat16.

    The biases of time steps are drawn as published models initialise them, so that states last for many tokens.
    """
    architecture, config = ARCHITECTURES[name], configuration(name)
    key = jax.random.key(seed, impl="rbg")
    state = jax.jit(lambda key: nnx.state(architecture.Model(config, nnx.Rngs(key))))(key)
    rng, weights = np.random.default_rng(seed), []
    for place, variable in nnx.to_flat_state(state):
        if str(place[-1]) in ("dt_bias", "dt_proj_bias"):
            step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), variable.shape))
            variable = variable.replace(jnp.asarray(np.log(np.expm1(step)), variable.dtype))
        weights.append((place, variable))
    return nnx.from_flat_state(weights)


def models(name: str, seed: int) -> dict[str, Any]:
    """Makes the model in each dtype, "bfloat16" and "float32", with the same weights."""
    if name == TRAINED:
        model = load_model(BYTE_MODEL, "bfloat16")
        architecture, config, state = ARCHITECTURES["qwen3_5_text"], model.config, nnx.state(model)
    else:
        architecture, config, state = ARCHITECTURES[name], configuration(name), _random_weights(name, seed)
    found = {}
    for dtype in ("bfloat16", "float32"):
        of = replace(config, dtype=dtype)
        graph, shapes = nnx.split(nnx.eval_shape(lambda of=of: architecture.Model(of, nnx.Rngs(0))))
        found[dtype] = nnx.merge(graph, jax.tree.map(lambda x, like: x.astype(like.dtype), state, shapes))
    return found


@functools.partial(jax.jit, static_argnames=("graph", "align"), donate_argnames=("state", "pool", "kv"))
def _step(
    params: Any, tokens: Any, batch: StepBatch, tables: Any, pages: Any, state: Any, pool: Any, kv: Any, *, graph, align
):
    """One program for both kinds of rows. Decode rows come first; the rows of the kind that a step lacks are padding.

    `state`, `pool` and `kv` are donated.
    """
    model, rows = nnx.merge(graph, params), batch.idx_mapping.shape[0]
    state, indices = begin_step(align, state, batch, tables)
    step = step_inputs(
        batch, indices, num_decode_rows=ROWS, page_tables=pages, num_tokens=tokens.shape[0],
        page_size=PAGE_SIZE, num_pages=kv.keys.shape[1],
    )  # fmt: skip
    hidden, pool, kv = model(tokens, step, pool, kv)
    state, pool = finish_step(align, state, pool, batch, indices, jnp.ones(rows, jnp.int32), tables)
    return model.logits(hidden), state, pool, kv


class Pass:
    """Runs tokens, int32 [rows, length], through one model: prompts of `prompt` tokens, then one token at a time."""

    def __init__(self, model: Any, tokens: np.ndarray, prompt: int) -> None:
        """Traces and lowers the program, which holds Python's lock. `compile` does the rest."""
        self.tokens, self.prompt = tokens, prompt
        length = -(-tokens.shape[1] // PAGE_SIZE) * PAGE_SIZE
        graph, self.params = nnx.split(model)
        self.align = AlignConfig(model.state_groups(), length, max_num_seqs=ROWS, max_model_len=length, mode="none")
        blocks = np.tile(np.arange(1, 1 + ROWS, dtype=np.int32)[:, None], (len(self.align.groups), 1, 1))
        pages = np.arange(1, 1 + ROWS * length // PAGE_SIZE, dtype=np.int32).reshape(ROWS, -1)
        self.fixed = BlockTables(blocks=jnp.asarray(blocks)), jnp.asarray(pages)
        kv = model.kv_spec(), 1 + pages.size, PAGE_SIZE
        self._fresh = lambda: (
            AlignState.create(self.align), StatePool.create(self.align, 1 + ROWS), KVPages.create(*kv)
        )  # fmt: skip
        precision = "highest" if model.dtype == "float32" else None
        with jax.default_matmul_precision(precision):
            arguments = *self._inputs(0, prompt), *self.fixed, *self._fresh()
            traced = _step.trace(self.params, *arguments, graph=graph, align=self.align)
            self.kernels, self._lowered = kernels(traced.jaxpr.jaxpr), traced.lower()

    def _inputs(self, begin: int, end: int) -> tuple[np.ndarray, StepBatch]:
        decode = end - begin == 1
        lengths = [end - begin] * ROWS
        lengths = [*lengths, *[0] * ROWS] if decode else [*[0] * ROWS, *lengths]
        slots = [*range(ROWS), *[-1] * ROWS] if decode else [*[-1] * ROWS, *range(ROWS)]
        loc = np.cumsum([0, *lengths]).tolist()
        packed = np.zeros(ROWS * (1 + self.prompt), np.int32)
        packed[: loc[-1]] = self.tokens[:, begin:end].ravel()
        return packed, StepBatch.from_host(self.align, 2 * ROWS, slots, loc, [-1] * 2 * ROWS)

    def compile(self) -> "Pass":
        """Compiles the program, which `run` needs, and returns this object."""
        self.program = self._lowered.compile()
        return self

    def run(self, ends: Iterable[int] = ()) -> jax.Array:
        """Returns the logits, float [rows, length, vocab].

        Each step ends at the next of `ends`. Without them the first step reads the prompt and each later one a token.
        """
        parts, carried = [], self._fresh()
        for begin, end in itertools.pairwise([0, *(ends or range(self.prompt, self.tokens.shape[1] + 1))]):
            logits, *carried = self.program(self.params, *self._inputs(begin, end), *self.fixed, *carried)
            parts.append(logits[: ROWS * (end - begin)].reshape(ROWS, end - begin, -1))
        return jnp.concatenate(parts, axis=1)


def _inner(eqn: Any) -> list[Any]:
    leaves = jax.tree.leaves(list(eqn.params.values()))
    return [getattr(leaf, "jaxpr", leaf) for leaf in leaves if hasattr(leaf, "eqns")]


def _has_kernel(jaxpr: Any) -> bool:
    return any(eqn.primitive.name == "pallas_call" or any(map(_has_kernel, _inner(eqn))) for eqn in jaxpr.eqns)


def kernels(jaxpr: Any) -> dict[str, bool]:
    """For each op and function of `pallas_kernels` that a traced program calls, whether all its calls have a kernel.

    Dense products are left out: those of many tokens have none, because XLA's are faster.
    """
    found: dict[str, bool] = {}
    for eqn in jaxpr.eqns:
        for inner in _inner(eqn):
            function, _, file = (inner.debug_info.func_src_info or "").partition(" at ")
            op = re.search(r"pallas_kernels/(\w+)/api.py", file)
            if op and op[1] != "linear":
                name = f"{op[1]}.{function.strip('_')}"
                found[name] = found.get(name, True) and _has_kernel(inner)
            elif not op:
                found |= kernels(inner)
    return found


@jax.jit
def _compare(got: jax.Array, wanted: jax.Array) -> dict[str, jax.Array]:
    choice, rms = got.argmax(-1), lambda x: jnp.sqrt(jnp.mean(jnp.square(x)))
    loss = wanted.max(-1) - jnp.take_along_axis(wanted, choice[..., None], -1)[..., 0]
    scale = rms(wanted)
    return {
        "top1_agreement": jnp.mean((choice == wanted.argmax(-1)).astype(jnp.float32)),
        "rms_error": rms(got - wanted) / scale,
        "largest_loss": loss.max() / scale,
        "logits_rms": scale,
    }


def _tokens(name: str, vocab: int, length: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if name != TRAINED:
        return rng.integers(0, vocab, (ROWS, length)).astype(np.int32)
    text = np.array(encode(TEXT.read_text()), np.int32)
    return np.stack([text[begin : begin + length] for begin in rng.integers(0, len(text) - length, ROWS)])


def measure(names: list[str], prompt: int, decode: int, seed: int) -> Iterator[Row]:
    """Yields a row for each model as soon as it is measured."""
    passes = {}
    # Several threads trace one after another but compile at the same time. XLA's compiler for CPUs has crashed in threads.
    with ThreadPoolExecutor(1 if jax.default_backend() == "cpu" else None) as pool:
        for name in names:
            both = models(name, seed)
            tokens = _tokens(name, both["float32"].config.vocab_size, prompt + decode, seed)
            passes[name] = {d: pool.submit(Pass(m, tokens, prompt).compile) for d, m in both.items()}
        for name in names:
            both = {dtype: each.result() for dtype, each in passes.pop(name).items()}
            logits = {dtype: each.run() for dtype, each in both.items()}
            row: Row = {"case": f"precision {name}", "model": name, "tokens": ROWS * (prompt + decode)}
            row |= {key: float(value) for key, value in _compare(logits["bfloat16"], logits["float32"]).items()}
            for part, where in dict(prefill=slice(prompt), decode=slice(prompt, None)).items():
                found = _compare(*(logits[dtype][:, where] for dtype in ("bfloat16", "float32")))
                row |= {f"{part}_{key}": float(found[key]) for key in ("top1_agreement", "rms_error")}
            for dtype, each in both.items():
                xla = sorted(op for op, has_kernel in each.kernels.items() if not has_kernel)
                row |= {f"ops_{dtype}": sorted(each.kernels), f"xla_ops_{dtype}": xla}
            yield row


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measures, prints and writes the rows, and returns them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [TRAINED, *MODELS]
    parser.add_argument("--model", choices=names, action="append", help="default: all")
    parser.add_argument("--prompt", type=int, default=192, help=f"tokens in each of {ROWS} prompts")
    parser.add_argument("--decode", type=int, default=32, help="tokens after each prompt, one at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="append one JSON row for each model to this file")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args(arguments)
    begin, machine, rows = time.perf_counter(), facts(options.commit), []
    print(machine, flush=True)
    for row in measure(options.model or names, options.prompt, options.decode, options.seed):
        rows.append(row | machine)
        xla = [f"{op} of {dtype}" for dtype in ("bfloat16", "float32") for op in row[f"xla_ops_{dtype}"]]
        print(
            f"{row['model']}: the same token first {100 * row['top1_agreement']:.2f} % of {row['tokens']}, rms error "
            f"{row['rms_error']:.1e}, largest loss {row['largest_loss']:.1e}; without a kernel: {', '.join(xla) or 'none'} "
            f"({time.perf_counter() - begin:.0f} s)",
            flush=True,
        )
        append(options.json, rows[-1])
    return rows


if __name__ == "__main__":
    main()
