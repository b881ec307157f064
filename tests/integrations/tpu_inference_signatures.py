"""Reads the signatures that the adapter relies on from tpu-inference's files, without importing them."""

import ast
import json
from pathlib import Path

RECORDED = Path(__file__).parent / "data" / "tpu_inference_signatures.json"
BACKENDS = "tpu_inference/layers/common/attention_backend.py"
KERNEL = "tpu_inference/kernels/gdn/v3/wrapper.py"
VLLM = "tpu_inference/layers/vllm/backends/flash_attn.py"


def signatures(folder):
    """Returns what `RECORDED` holds, for the unpacked wheel in `folder`."""

    def names(file, function):
        arguments = find(file, function).args
        return [argument.arg for argument in [*arguments.args, *arguments.kwonlyargs]]

    def find(file, name):
        tree = ast.parse((folder / file).read_text())
        return next(node for node in ast.walk(tree) if getattr(node, "name", None) == name)

    name = find(VLLM, "PallasAttentionBackend").name
    return {
        "register_attention_backend": names(BACKENDS, "register_attention_backend"),
        "conv1d_gdn_kernel": names(BACKENDS, "conv1d_gdn_kernel"),
        "fused_conv1d_gdn": names(KERNEL, "fused_conv1d_gdn"),
        "PallasAttentionBackend": f"{VLLM.removesuffix('.py').replace('/', '.')}.{name}",
    }


def recorded():
    """Returns the recorded signatures."""
    return json.loads(RECORDED.read_text())
