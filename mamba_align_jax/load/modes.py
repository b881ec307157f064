"""Names the modes that the demo and the benchmark compare."""

from typing import Any

# The fields of EngineConfig that make each mode. Every model serves these.
COMPARED_MODES: dict[str, dict[str, Any]] = {
    "none": dict(prefix_cache="none"),
    "align/pre_copy": dict(prefix_cache="align", policy="pre_copy"),
    "align/copy_free": dict(prefix_cache="align", policy="copy_free"),
}
# Those that the benchmark can measure besides, with models that serve them.
MODES = COMPARED_MODES | {"align/deferred": dict(prefix_cache="align", policy="deferred")}
