"""Trains the bundled byte-level model on text that ships with CPython, through the model's own layers.

    python examples/train_byte_model.py --prepare corpus.npz          # reads the standard library's text
    python examples/train_byte_model.py --corpus corpus.npz --minutes 3 --mtp-minutes 1 --out DIR
    python examples/train_byte_model.py --corpus corpus.npz --mtp-only --mtp-minutes 1 --out DIR

The text is documentation (docstrings and the language reference of `pydoc_data.topics`) and source code, as bytes. Byte 0
separates documents. Every tenth topic is held out for measuring, and another tenth chooses the best step. The text is
CPython's, under the Python Software Foundation License.

The draft head is trained after the model, on the finished model's own predictions. The third command keeps the bundled
model's weights and trains a new head for it. The second and third commands need a GPU; they take the given minutes and the
time to compile.
"""

import argparse
import ast
import dataclasses
import functools
import importlib
import math
import sys
import sysconfig
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.lax import Precision

from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.layers.attention import Attention
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.layers.residual import total
from mamba_align_jax.metadata.layer_step import LayerStep
from mamba_align_jax.metadata.rows import Rows, RowSplit
from mamba_align_jax.models import load_model, qwen3_5
from mamba_align_jax.models.causal_lm import CausalLM
from mamba_align_jax.models.weights import save_weights

CONFIG = qwen3_5.Config(
    vocab_size=256, hidden_size=256, intermediate_size=352, num_hidden_layers=8,
    layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention") * 2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=64, linear_value_head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
    eos_token_id=0, rope_theta=1e7,
)  # fmt: skip
TINY = dataclasses.replace(
    CONFIG, hidden_size=32, intermediate_size=32, num_hidden_layers=2, layer_types=CONFIG.layer_types[2:4],
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_value_heads=2, linear_key_head_dim=16,
    linear_value_head_dim=16,
)  # fmt: skip
DEPTH = 3  # the number of consecutive drafts that the head is trained to make
LICENSE = """The weights in this directory were trained on the documentation and source code of CPython's standard
library, copyright the Python Software Foundation and others, which is distributed under the Python Software Foundation
License Version 2 (https://docs.python.org/3/license.html). The weights are under this project's Apache-2.0 licence.
"""


def topics(stdlib: Path) -> dict[str, str]:
    """Returns the sections of the language reference by name."""
    tree = ast.parse((stdlib / "pydoc_data" / "topics.py").read_text())
    assignment = next(node for node in tree.body if isinstance(node, ast.Assign))
    return ast.literal_eval(assignment.value)


def docstrings(source: str) -> list[str]:
    """Returns the docstrings of a module, its classes and its functions, each after the line that it documents."""
    lines, found = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) > 60:
                head = "" if isinstance(node, ast.Module) else lines[node.lineno - 1].strip() + "\n"
                found.append(f'{head}"""{text}\n"""\n')
    return found


def builtin_docs() -> list[str]:
    """Returns the docstrings of modules that are written in C, from the running interpreter."""
    found: dict[str, None] = {}
    for name in sorted(sys.builtin_module_names):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module = importlib.import_module(name)
        for owner in [module, *(value for value in vars(module).values() if isinstance(value, type))]:
            for key, value in sorted(vars(owner).items()):
                text = getattr(value, "__doc__", None)
                if callable(value) and isinstance(text, str) and len(text) > 60:
                    found[f"{name}.{key}:\n{text}\n"] = None
    return list(found)


def prepare(stdlib: Path) -> dict[str, np.ndarray]:
    """Reads the corpus: uint8 arrays "docs", "code", "validation" and "heldout"."""
    sections = topics(stdlib)
    names = sorted(sections)
    heldout = [sections[name] for name in names[::10]]
    validation = [sections[name] for name in names[5::10]]
    # Topics quote one another. A paragraph that is used for measuring must not be trained on.
    measured = {part.strip() for text in heldout + validation for part in text.split("\n\n") if len(part) > 40}
    docs = []
    for name in sorted(set(names) - set(names[::10]) - set(names[5::10])):
        docs.append("\n\n".join(part for part in sections[name].split("\n\n") if part.strip() not in measured))
    docs += builtin_docs()
    docs += [file.read_text(errors="ignore") for file in sorted(stdlib.rglob("*.txt")) if "test" not in file.parts]
    code = []
    for file in sorted(stdlib.rglob("*.py")):
        inside = file.relative_to(stdlib).parts
        if {"test", "tests", "site-packages", "encodings", "pydoc_data", "dist-packages"} & set(inside):
            continue
        try:
            source = file.read_text()
            docs += docstrings(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        code.append(source)
    join = lambda texts: np.frombuffer("\0".join(texts).encode(), np.uint8)
    return {"docs": join(docs), "code": join(code), "validation": join(validation), "heldout": join(heldout)}


def _graph(config: qwen3_5.Config) -> nnx.GraphDef:
    """Returns the graph of a model whose products can be differentiated, which those of the kernels cannot."""
    model = nnx.eval_shape(lambda: qwen3_5.Model(config, nnx.Rngs(0)))
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            module.implementation = "xla"
    return nnx.split(model)[0]


def _logits(model: CausalLM, hidden: jax.Array) -> jax.Array:
    """Computes float32 logits [..., vocab] of hidden states [..., hidden]."""
    weight = model.embed_tokens.embedding[...] if model.lm_head is None else model.lm_head.weight[...]
    return jnp.matmul(hidden, weight.T, preferred_element_type=jnp.float32)


def _attend(queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """Computes softmax(queries keys^T / sqrt(dim)) values, where `mask` allows it, with a softmax in float32.

    Args:
        queries: [n, heads, dim]
        keys: [places, kv_heads, dim]
        values: [places, kv_heads, value_dim]
        mask: Whether a query sees a place. bool [n, places]

    Returns:
        [n, heads, value_dim] in the dtype of `queries`.
    """
    n, heads, dim = queries.shape
    precision = Precision.HIGHEST if queries.dtype == jnp.float32 else Precision.DEFAULT
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    grouped = queries.reshape(n, keys.shape[1], -1, dim)
    scores = product("nhgd,lhd->hgnl", grouped, keys) * dim**-0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min), axis=-1)
    out = product("hgnl,lhd->nhgd", weights.astype(values.dtype), values)
    return out.reshape(n, heads, -1).astype(queries.dtype)


def _output(mixer: Attention, attended: jax.Array, gate: jax.Array | None) -> jax.Array:
    """Computes `Attention.output` of sequences, [sequences, length, hidden]."""
    return jax.vmap(lambda x, gate: total(mixer.output(x, gate), x.dtype))(attended, gate)


def _feed_forward(layer: qwen3_5.Layer, x: jax.Array) -> jax.Array:
    """Computes a layer's feed-forward part of [sequences, length, hidden]."""
    return jax.vmap(lambda y: total(layer.mlp(y), y.dtype))(layer.post_attention_layernorm(x))


def forward(model: qwen3_5.Model, tokens: jax.Array) -> jax.Array:
    """Computes the hidden states, float [sequences, length, hidden], of tokens, int [sequences, length].

    Each sequence is one new prefill row whose states are not kept.
    """
    length = tokens.shape[1]
    none, one = jnp.zeros((0,), jnp.int32), jnp.zeros((1,), jnp.int32)
    rows = lambda loc, row: Rows(
        query_start_loc=loc, num_computed_tokens=row, read=row[None], window_read=row[None], window_row=row,
        write=row[None, :, None],
    )  # fmt: skip
    prefill = rows(jnp.array([0, length], jnp.int32), one)
    split = RowSplit(decode=rows(one, none), prefill=prefill, first_prefill_token=one[0])
    at = LayerStep(rows=split, chunks=split.chunks(length), layer=one[0], implementation="xla")
    positions = jnp.arange(length, dtype=jnp.int32)
    x = model.embed_tokens(tokens)
    for layer in model.layers:
        assert isinstance(layer, qwen3_5.Layer)
        normed = layer.input_layernorm(x)
        if hasattr(layer, "linear_attn"):
            mixer = layer.linear_attn
            conv, recurrent = (
                jnp.zeros((1, 2, *state.block_shape(0)), state.dtype) for state in mixer.states(model.dtype, "float32")
            )
            run = lambda y, mixer=mixer, pools=(conv, recurrent): total(mixer(y, at, *pools)[0], y.dtype)
            out = jax.vmap(jax.checkpoint(run))(normed)
        else:
            mixer = layer.self_attn
            q, k, v, gate = jax.vmap(mixer.project, (0, None))(normed, positions)
            attended = jax.vmap(_attend, (0, 0, 0, None))(q, k, v, positions[:, None] >= positions)
            out = _output(mixer, attended, gate)
        x = x + out
        x = x + _feed_forward(layer, x)
    return model.norm(x)


def head_logits(model: qwen3_5.Model, hidden: jax.Array, tokens: jax.Array, depth: int) -> list[jax.Array]:
    """Computes the draft head's logits for `depth` consecutive drafts: `depth` arrays [sequences, length - depth, vocab].

    The head runs as in an engine, but reads the text in place of drafts. Its first pass takes the model's hidden states, and
    each later pass takes the output of the pass before it. A position attends to the first pass' keys of all positions up to
    itself, and to its own keys of later passes.

    Args:
        model: A model with a draft head.
        hidden: The model's hidden states. float [sequences, length, hidden]
        tokens: The text. int [sequences, length]
        depth: The number of drafts.
    """
    head, length = model.mtp, tokens.shape[1] - depth
    assert head is not None
    decoder, mixer = head.layers[0], head.layers[0].self_attn
    positions = jnp.arange(length, dtype=jnp.int32)
    keys, values, masks, logits = [], [], [], []
    hidden = hidden[:, :length]
    for n in range(depth):
        x = head.join(model.embed_tokens(tokens[:, n + 1 : n + 1 + length]), hidden)
        q, k, v, gate = jax.vmap(mixer.project, (0, None))(decoder.input_layernorm(x), positions + n)
        keys.append(k)
        values.append(v)
        masks.append(positions[:, None] == positions if n else positions[:, None] >= positions)
        every = (jnp.concatenate(keys, axis=1), jnp.concatenate(values, axis=1), jnp.concatenate(masks, axis=1))
        attended = jax.vmap(jax.checkpoint(_attend), (0, 0, 0, None))(q, *every)
        x = x + _output(mixer, attended, gate)
        x = x + _feed_forward(decoder, x)
        hidden = head.norm(x)
        logits.append(_logits(model, hidden))
    return logits


def served(params: nnx.State) -> nnx.State:
    """Rounds weights to bfloat16, the dtype in which they are served."""
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)


def bits(graph: nnx.GraphDef, params: nnx.State, fixed: None, tokens: jax.Array) -> jax.Array:
    """Returns the mean bits per byte of predicting each byte from the bytes before it."""
    model = nnx.merge(graph, served(params))
    logits = _logits(model, forward(model, tokens[:, :-1]))
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])) / math.log(2)


def head_and_model_logits(graph: nnx.GraphDef, params: nnx.State, fixed: nnx.State, tokens: jax.Array):
    """Returns the logits of the draft head and those of the model for the same tokens: two lists with an array per depth."""
    model = nnx.merge(graph, served(params), fixed)
    hidden = forward(model, tokens)
    of_head, length = head_logits(model, hidden, tokens, DEPTH), tokens.shape[1] - DEPTH
    return of_head, [_logits(model, hidden[:, n : n + length]) for n in range(1, DEPTH + 1)]


def head_bits(graph: nnx.GraphDef, params: nnx.State, fixed: nnx.State, tokens: jax.Array) -> jax.Array:
    """Returns the mean bits per byte at which the draft head predicts the model's own predictions, over all depths."""
    losses = [
        jnp.mean(optax.softmax_cross_entropy(of_head, jax.nn.softmax(of_model)))
        for of_head, of_model in zip(*head_and_model_logits(graph, params, fixed, tokens[:, :-1]), strict=True)
    ]
    return jnp.mean(jnp.stack(losses)) / math.log(2)


def agreement(graph: nnx.GraphDef, params: nnx.State, fixed: nnx.State, tokens: jax.Array) -> jax.Array:
    """Returns, for each depth, how often the head's best token is the model's best, if all earlier drafts are right."""
    pairs = zip(*head_and_model_logits(graph, params, fixed, tokens[:, :-1]), strict=True)
    return jnp.stack([jnp.mean(of_head.argmax(-1) == of_model.argmax(-1)) for of_head, of_model in pairs])


def windows(text: jax.Array, key: jax.Array, count: int, length: int) -> jax.Array:
    """Draws `count` random parts of a text, int32 [count, length]."""
    start = jax.random.randint(key, (count, 1), 0, text.shape[0] - length)
    return text[start + jnp.arange(length)].astype(jnp.int32)


def evaluate(measure, text: np.ndarray, length: int) -> np.ndarray:
    """Returns the mean of `measure(tokens)` over all whole windows of `length` bytes of a text."""
    rows = np.asarray(text[: len(text) // length * length]).reshape(-1, length).astype(np.int32)
    return np.mean([measure(jnp.asarray(row[None])) for row in rows], axis=0)


def descend(
    objective,
    params: nnx.State,
    fixed: nnx.State | None,
    corpus: dict[str, np.ndarray],
    minutes: float,
    options: argparse.Namespace,
) -> nnx.State:
    """Trains `params` for some minutes and returns the parameters that validate best.

    `objective(params, fixed, tokens)` returns bits per byte. `fixed` is not trained. Each call of the compiled program runs
    `options.calls` steps.
    """
    print(f"{sum(p.size for p in jax.tree.leaves(params)) / 1e6:.2f} M parameters", flush=True)
    decays = jax.tree.map(lambda p: p.ndim > 1, params)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.98), optax.add_decayed_weights(0.1, decays)
    )
    batch, length, calls = options.batch, options.length, options.calls
    docs, code = jnp.asarray(corpus["docs"]), jnp.asarray(corpus["code"])

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def steps(params, moments, fixed, key, rate):
        def step(carry, key):
            params, moments = carry
            first, second = jax.random.split(key)
            tokens = jnp.concatenate(
                [
                    windows(docs, first, batch // 2, length + 1),
                    windows(code, second, batch - batch // 2, length + 1),
                ]
            )
            loss, gradient = jax.value_and_grad(objective)(params, fixed, tokens)
            updates, moments = optimizer.update(gradient, moments, params)
            params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
            return (params, moments), loss

        (params, moments), losses = jax.lax.scan(step, (params, moments), jax.random.split(key, calls))
        return params, moments, losses

    measure = jax.jit(objective)
    moments, key = optimizer.init(params), jax.random.key(0)
    best, chosen, call, begin, done = math.inf, params, 0, None, 0.0
    while done < 1:
        rate = 2e-3 * min(1.0, (call + 1) * calls / 200) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * done)))
        key, now = jax.random.split(key)
        params, moments, losses = steps(params, moments, fixed, now, rate)
        loss = float(jnp.mean(losses))
        begin = begin or time.monotonic()  # the time to compile does not count
        done = (time.monotonic() - begin) / (60 * minutes) if minutes else 1.0
        call += 1
        if call % 10 == 0 or done > 0.97:
            validation = float(evaluate(functools.partial(measure, params, fixed), corpus["validation"], length))
            print(
                f"{call * calls:6d} steps {done:4.0%}  train {loss:.3f}  validation {validation:.3f} bits/byte",
                flush=True,
            )
            if validation < best:
                best, chosen = validation, jax.tree.map(jnp.copy, params)
    return chosen


def train(corpus: dict[str, np.ndarray], config: qwen3_5.Config, options: argparse.Namespace) -> qwen3_5.Model:
    """Trains a model from random weights and returns it in bfloat16."""
    graph = _graph(config)
    exact = dataclasses.replace(config, dtype="float32")
    params = nnx.state(qwen3_5.Model(exact, nnx.Rngs(0)), nnx.Param)
    objective = functools.partial(bits, graph)
    chosen = descend(objective, params, None, corpus, options.minutes, options)
    measure = functools.partial(jax.jit(objective), chosen, None)
    print(f"held-out documentation: {evaluate(measure, corpus['heldout'], options.length):.3f} bits/byte", flush=True)
    return nnx.merge(graph, served(chosen))


def train_head(corpus: dict[str, np.ndarray], model: CausalLM, options: argparse.Namespace) -> CausalLM:
    """Trains a new draft head for a model and returns both in bfloat16. The model's own weights are unchanged."""
    config = qwen3_5.Config.from_dict(model.config.to_dict() | {"mtp_num_hidden_layers": 1})
    head = qwen3_5.draft_head(dataclasses.replace(config, dtype="float32"), nnx.Rngs(0))
    params = nnx.State({"mtp": nnx.state(head, nnx.Param)})
    fixed = served(nnx.split_state(nnx.state(model, nnx.Param), nnx.PathContains("mtp"), ...)[1])
    graph = _graph(config)
    chosen = descend(functools.partial(head_bits, graph), params, fixed, corpus, options.mtp_minutes, options)
    measure = functools.partial(jax.jit(functools.partial(agreement, graph)), chosen, fixed)
    for name in ("validation", "heldout"):
        shares = evaluate(measure, corpus[name], options.length)
        print(
            f"{name}: drafts 1 to {DEPTH} are the model's own choice in {', '.join(f'{share:.1%}' for share in shares)} if "
            f"all earlier drafts are; {np.cumprod(shares).sum():.2f} drafts of a step would be accepted",
            flush=True,
        )
    return nnx.merge(graph, served(chosen), fixed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--prepare", metavar="FILE", help="write the corpus to FILE and stop")
    parser.add_argument("--heldout", metavar="FILE", help="with --prepare: write the held-out text to FILE")
    parser.add_argument("--corpus", metavar="FILE", help="a prepared corpus; default: prepare one now")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--mtp-minutes", type=float, default=1.0, help="minutes for the draft head; 0 makes none")
    parser.add_argument("--mtp-only", action="store_true", help="train only a new draft head for the bundled model")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--calls", type=int, default=20, help="steps per call of the compiled program")
    parser.add_argument("--tiny", action="store_true", help="train a tiny model, to try the script")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.prepare:
        corpus = prepare(options.stdlib)
        np.savez_compressed(options.prepare, allow_pickle=False, **corpus)
        print({name: f"{len(text):,} bytes" for name, text in corpus.items()})
        if options.heldout:
            Path(options.heldout).write_bytes(corpus["heldout"].tobytes())
        return
    corpus = dict(np.load(options.corpus)) if options.corpus else prepare(options.stdlib)
    model = load_model(BYTE_MODEL) if options.mtp_only else train(corpus, TINY if options.tiny else CONFIG, options)
    if options.mtp_minutes:
        model = train_head(corpus, model, options)
    if options.out:
        save_weights(model, qwen3_5, options.out)
        (options.out / "LICENSE").write_text(LICENSE)
        print(f"saved to {options.out}")


if __name__ == "__main__":
    main()
