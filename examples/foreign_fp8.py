"""Multiplies by FP8 weights in the jitted step of another server, which has its own loader, layers and parameters.

The program writes one feed-forward layer as published FP8 files hold it, with a scale for each block of 128 x 128, reads it
as it is, and checks the step against float64. In memory the layer has one byte for each weight.
"""

import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

import pallas_kernels as pk
from mamba_align_jax.models import read_product
from pallas_kernels.quantized import dequantized

HIDDEN, CHANNELS, TOKENS = 192, 320, 5
MLP = "model.layers.0.mlp"


def write_directory(path):
    """Writes the layer. The server's own files are downloaded instead."""
    rng, tensors = np.random.default_rng(0), {}
    for name, shape in (
        ("gate_proj", (CHANNELS, HIDDEN)),
        ("up_proj", (CHANNELS, HIDDEN)),
        ("down_proj", (HIDDEN, CHANNELS)),
    ):
        (part,) = pk.quantize(rng.normal(size=shape).astype(np.float32) * shape[1] ** -0.5).parts
        tensors |= {f"{MLP}.{name}.weight": part.values, f"{MLP}.{name}.weight_scale_inv": part.scales}
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path / "model.safetensors")


def load_layer(path):
    """Reads the layer's weights. Gate and up are one product, of two parts whose blocks begin anew."""
    return {
        "gate_up": read_product(path, [f"{MLP}.gate_proj.weight", f"{MLP}.up_proj.weight"], "float32"),
        "down": read_product(path, [f"{MLP}.down_proj.weight"], "float32"),
    }


@jax.jit
def step(weights, x):
    """Runs the server's step. A quantised weight is a pytree, so it is passed, donated and placed like any other."""
    (gated,) = pk.linear(x, weights["gate_up"], is_gated=True)
    (out,) = pk.linear(gated, weights["down"])
    return x + out


def main():
    """Loads the layer, runs a step and compares it with NumPy."""
    with tempfile.TemporaryDirectory() as folder:
        write_directory(Path(folder))
        weights = load_layer(folder)
    x = np.random.default_rng(1).normal(size=(TOKENS, HIDDEN)).astype(np.float32)
    found = np.asarray(step(weights, jnp.asarray(x)))

    gate_up, down = (np.asarray(dequantized(weights[name]), np.float64) for name in ("gate_up", "down"))
    gate, up = np.split(x.astype(np.float64) @ gate_up.T, 2, axis=1)
    wanted = x + (gate / (1 + np.exp(-gate)) * up) @ down.T
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    numbers, size = 3 * HIDDEN * CHANNELS, sum(weight.nbytes for weight in weights.values())
    print(f"{numbers} weights lie in {size} bytes, and {TOKENS} tokens are right")


if __name__ == "__main__":
    main()
