"""Trains the bundled byte-level model on text that ships with CPython, through the model's own layers.

    python examples/train_byte_model.py --prepare corpus.npz          # reads a standard library's text
    python examples/train_byte_model.py --corpus corpus.npz --minutes 3 --out DIR

Documentation (docstrings, the language reference of `pydoc_data.topics`) and source code, as bytes; byte 0 separates
documents. Every tenth topic is held out for measuring and another tenth for choosing the best step. The text is
CPython's, under the Python Software Foundation License. The second command wants a GPU and takes its minutes plus
compilation.
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

from mamba_align_jax.layers.attention import attend
from mamba_align_jax.metadata.rows import Rows, RowSplit
from mamba_align_jax.models import qwen3_5
from mamba_align_jax.models.checkpoint import save_checkpoint
from pallas_kernels import chunk_rows

CONFIG = qwen3_5.Config(
    vocab_size=256, hidden_size=256, intermediate_size=352, num_hidden_layers=8,
    layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention") * 2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=64, linear_value_head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
    eos_token_id=0,
)  # fmt: skip
TINY = dataclasses.replace(
    CONFIG, hidden_size=32, intermediate_size=32, num_hidden_layers=2, layer_types=CONFIG.layer_types[2:4],
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_value_heads=2, linear_key_head_dim=16,
    linear_value_head_dim=16,
)  # fmt: skip
LICENSE = """The weights in this directory were trained on the documentation and source code of CPython's standard
library, copyright the Python Software Foundation and others, which is distributed under the Python Software Foundation
License Version 2 (https://docs.python.org/3/license.html). The weights are under this project's Apache-2.0 licence.
"""


def topics(stdlib: Path) -> dict[str, str]:
    """The language reference's sections, by name."""
    tree = ast.parse((stdlib / "pydoc_data" / "topics.py").read_text())
    assignment = next(node for node in tree.body if isinstance(node, ast.Assign))
    return ast.literal_eval(assignment.value)


def docstrings(source: str) -> list[str]:
    """Docstrings of a module, its classes and functions, each behind the line that it documents."""
    lines, found = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) > 60:
                head = "" if isinstance(node, ast.Module) else lines[node.lineno - 1].strip() + "\n"
                found.append(f'{head}"""{text}\n"""\n')
    return found


def builtin_docs() -> list[str]:
    """Docstrings of the modules that are written in C, from the running interpreter."""
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
    """uint8 arrays: docs, code, validation and heldout."""
    sections = topics(stdlib)
    names = sorted(sections)
    heldout = [sections[name] for name in names[::10]]
    validation = [sections[name] for name in names[5::10]]
    # Topics quote one another: a paragraph that is measured must not be trained on.
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


def forward(model: qwen3_5.Model, tokens: jax.Array) -> jax.Array:
    """Logits [sequences, length, vocab] of whole sequences: each one fresh prefill row that keeps no state."""
    length = tokens.shape[1]
    none, one = jnp.zeros((0,), jnp.int32), jnp.zeros((1,), jnp.int32)
    rows = lambda loc, row: Rows(
        query_start_loc=loc, num_computed_tokens=row, recurrent_read=row[None], conv_read=row[None], conv_row=row,
        write=row[None, :, None],
    )  # fmt: skip
    prefill = rows(jnp.array([0, length], jnp.int32), one)
    split = RowSplit(decode=rows(one, none), prefill=prefill, first_prefill_token=one[0])
    chunks = chunk_rows(prefill.query_start_loc, one, length)
    positions = jnp.arange(length, dtype=jnp.int32)
    x = model.embed_tokens(tokens)
    for layer in model.layers:
        normed = layer.input_layernorm(x)
        if hasattr(layer, "linear_attn"):
            mixer = layer.linear_attn
            conv, recurrent = (
                jnp.zeros((1, 2, *state.block_shape(0)), state.dtype) for state in mixer.states(model.dtype, "float32")
            )
            run = lambda y, mixer=mixer, conv=conv, recurrent=recurrent: mixer(
                y, split, chunks, conv, recurrent, one[0], implementation="xla"
            )[0]
            out = jax.vmap(jax.checkpoint(run))(normed)
        else:
            mixer = layer.self_attn
            q, k, v, gate = jax.vmap(mixer.project, (0, None))(normed, positions)
            attended = jax.vmap(attend, (0, 0, 0, None))(q, k, v, positions[:, None] >= positions)
            out = jax.vmap(mixer.output)(attended, gate)
        x = x + out
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.logits(model.norm(x))


def bits(graph: nnx.GraphDef, params: nnx.State, tokens: jax.Array) -> jax.Array:
    """Mean bits per byte of predicting each byte from those before; weights rounded to bfloat16 as they are served."""
    served = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    logits = forward(nnx.merge(graph, served), tokens[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])) / math.log(2)


def windows(text: jax.Array, key: jax.Array, count: int, length: int) -> jax.Array:
    """Random stretches of a corpus."""
    start = jax.random.randint(key, (count, 1), 0, text.shape[0] - length)
    return text[start + jnp.arange(length)].astype(jnp.int32)


def evaluate(measure, params: nnx.State, text: np.ndarray, length: int) -> float:
    """Bits per byte over all whole windows of a text."""
    rows = np.asarray(text[: len(text) // length * length]).reshape(-1, length).astype(np.int32)
    return float(np.mean([measure(params, jnp.asarray(row[None])) for row in rows]))


def train(corpus: dict[str, np.ndarray], config: qwen3_5.Config, minutes: float, batch: int, length: int, calls: int):
    """Trains for some minutes, a few steps per call; returns the model of the step that validates best."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: qwen3_5.Model(config, nnx.Rngs(0))))
    exact = dataclasses.replace(config, dtype="float32")
    params = nnx.state(qwen3_5.Model(exact, nnx.Rngs(0)), nnx.Param)
    print(f"{sum(p.size for p in jax.tree.leaves(params)) / 1e6:.2f} M parameters", flush=True)
    decays = jax.tree.map(lambda p: p.ndim > 1, params)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.98), optax.add_decayed_weights(0.1, decays)
    )
    docs, code = jnp.asarray(corpus["docs"]), jnp.asarray(corpus["code"])

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def steps(params, moments, key, rate):
        def step(carry, key):
            params, moments = carry
            first, second = jax.random.split(key)
            tokens = jnp.concatenate(
                [
                    windows(docs, first, batch // 2, length + 1),
                    windows(code, second, batch - batch // 2, length + 1),
                ]
            )
            loss, gradient = jax.value_and_grad(lambda p: bits(graph, p, tokens))(params)
            updates, moments = optimizer.update(gradient, moments, params)
            params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
            return (params, moments), loss

        (params, moments), losses = jax.lax.scan(step, (params, moments), jax.random.split(key, calls))
        return params, moments, losses

    measure = jax.jit(lambda params, tokens: bits(graph, params, tokens))
    moments, key = optimizer.init(params), jax.random.key(0)
    best, chosen, call, begin, done = math.inf, params, 0, None, 0.0
    while done < 1:
        rate = 2e-3 * min(1.0, (call + 1) * calls / 200) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * done)))
        key, now = jax.random.split(key)
        params, moments, losses = steps(params, moments, now, rate)
        loss = float(jnp.mean(losses))
        begin = begin or time.monotonic()  # compilation is not training
        done = (time.monotonic() - begin) / (60 * minutes)
        call += 1
        if call % 10 == 0 or done > 0.97:
            validation = evaluate(measure, params, corpus["validation"], length)
            print(
                f"{call * calls:6d} steps {done:4.0%}  train {loss:.3f}  validation {validation:.3f} bits/byte",
                flush=True,
            )
            if validation < best:
                best, chosen = validation, jax.tree.map(jnp.copy, params)
    print(f"held-out documentation: {evaluate(measure, chosen, corpus['heldout'], length):.3f} bits/byte", flush=True)
    return nnx.merge(graph, jax.tree.map(lambda p: p.astype(jnp.bfloat16), chosen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--prepare", metavar="FILE", help="write the corpus to FILE and stop")
    parser.add_argument("--heldout", metavar="FILE", help="with --prepare: write the held-out text to FILE")
    parser.add_argument("--corpus", metavar="FILE", help="a prepared corpus; default: prepare one now")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--calls", type=int, default=20, help="steps per call of the compiled program")
    parser.add_argument("--tiny", action="store_true", help="a model for trying the script out")
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
    config = TINY if options.tiny else CONFIG
    model = train(corpus, config, options.minutes, options.batch, options.length, options.calls)
    if options.out:
        save_checkpoint(model, qwen3_5, options.out)
        (options.out / "LICENSE").write_text(LICENSE)
        print(f"saved to {options.out}")


if __name__ == "__main__":
    main()
