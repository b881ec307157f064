"""The parts of sglang-jax that the adapter touches, under their names, for tests without sglang-jax.

`tests/integrations/data/sglang_jax_signatures.json` has the real signatures, and `make integrations` runs the real code.
"""

import sys
from types import ModuleType, SimpleNamespace

PACKAGE = "sgl_jax.srt"
LINEAR = f"{PACKAGE}.layers.attention.linear"


class LinearRecurrentAttnBackend:
    """The base of sglang-jax's linear-attention backends: a mesh and the step's metadata."""

    def __init__(self, mesh=None):
        self.mesh, self.forward_metadata = mesh, None

    @staticmethod
    def get_layer_cache(recurrent_state_pool, layer_id):
        return recurrent_state_pool.get_linear_recurrent_layer_cache(layer_id)


class HybridLinearKVPool:
    """A pool of keys and values of the full-attention layers alone, around one that counts them from 0."""

    def __init__(self, full_attention_layer_ids, full_kv_pool):
        self.full_attention_layer_ids, self.full_kv_pool = full_attention_layer_ids, full_kv_pool

    def _to_physical(self, layer_id):
        return self.full_attention_layer_ids.index(layer_id)


def put(monkeypatch):
    """Makes the stand-ins importable as sglang-jax, for one test. Returns the modules that `install` changes."""
    contents = {
        f"{PACKAGE}.layers.attention.hybrid_linear_attn_backend": dict(
            LinearRecurrentAttnBackend=LinearRecurrentAttnBackend
        ),
        f"{LINEAR}.gdn_backend": dict(GDNAttnBackend=object()),
        f"{LINEAR}.kda_backend": dict(KDAAttnBackend=object()),
        f"{PACKAGE}.mem_cache.memory_pool": dict(HybridLinearKVPool=type("Pool", (HybridLinearKVPool,), {})),
    }
    for name, members in contents.items():
        parts = name.split(".")
        for size in range(1, len(parts)):
            parent = ".".join(parts[:size])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(**{name.rpartition(".")[2]: sys.modules[name] for name in contents})
