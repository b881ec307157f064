"""The part of tpu-inference that the adapter touches, under its names, for tests without tpu-inference.

`tests/integrations/data/tpu_inference_signatures.json` has the real signatures, and `make integrations` compares them with
the package.
"""

import abc
import sys
from types import ModuleType

MODULE = "tpu_inference.layers.common.attention_backend"


class LinearAttentionBackend(abc.ABC):
    """The base of the backends of gated delta nets."""

    @abc.abstractmethod
    def conv1d_gdn_kernel(self):
        """Returns the kernel."""


class RPAAttentionBackend:
    """The backend of the attention layers."""


def put(monkeypatch):
    """Makes the stand-ins importable as tpu-inference, for one test. Returns the dict of what is registered."""
    registered = {}

    def register_attention_backend(name, *, attention, vllm_backend, linear_attention=None):
        registered[name] = dict(attention=attention, vllm_backend=vllm_backend, linear_attention=linear_attention)

    parts = MODULE.split(".")
    for size in range(1, len(parts)):
        name = ".".join(parts[:size])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType(MODULE)
    module.LinearAttentionBackend, module.RPAAttentionBackend = LinearAttentionBackend, RPAAttentionBackend
    module.register_attention_backend = register_attention_backend
    monkeypatch.setitem(sys.modules, MODULE, module)
    return registered
