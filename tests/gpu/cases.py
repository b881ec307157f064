"""Which cases of compiled kernels a run on a GPU keeps, as `quick.py` says it of all other tests.

Every two values that occur together in any case of a test still do, unless its cases take so long to compile that each value
occurs once. `python3 tests/gpu/run.py --depth=full` runs all cases.
"""

import quick

RULES = (
    ("*", quick.pairs),
    ("align/test_donation.py::*", quick.once),
    ("benchmarks/test_pipeline.py::*", quick.once),
    ("kernels/test_convolved_chains.py::test_one_launch_matches_the_oracle", quick.once),
    ("kernels/test_deferred_large_pools.py::*", quick.once),
    ("kernels/test_experts_of_one_token.py::*", quick.once),
    ("kernels/test_gated_delta_rule*.py::*", quick.once),
    ("kernels/test_linear.py::test_configurations_of_a_single_token_match_the_oracle", quick.once),
    ("kernels/test_mixture_of_experts.py::*", quick.once),
    ("kernels/test_paged_attention*.py::*", quick.once),
    ("kernels/test_prefill_variants.py::*", quick.once),
    ("kernels/test_product_chain.py::test_one_launch_of_several_tokens_matches_the_oracle", quick.once),
    ("kernels/test_random_calls.py::test_*match_float64", quick.once),
    ("kernels/test_selective_state_*.py::*", quick.once),
    ("kernels/test_ssd.py::*", quick.once),
    ("kernels/test_state_layout.py::*", quick.once),
    ("models/test_chained_decoding.py::*", quick.once),
    # The other families have a case in another file, against their equations.
    ("models/test_reference.py::*", quick.only("bamba", "lfm2", "lfm2_moe", "mamba", "mamba2", "qwen3_5_text")),
)


def mark(items):
    """Marks what a quick run on a GPU leaves out."""
    quick.leave_out([item for item in items if item.get_closest_marker("gpu") and is_compiled(item)], RULES)


def is_compiled(item):
    """Returns whether a GPU compiles what a test of the marker `gpu` runs: some of its cases may be interpreted ones."""
    return not hasattr(item, "callspec") or item.callspec.params.get("implementation") != "interpret"
