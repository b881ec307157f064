"""Which cases of the kernel tests leave a quick run.

Tracing and compiling a Triton kernel's body for the CPU ("interpret") takes seconds for each case. A quick run keeps the
first case of each test in interpret mode, and every case of the XLA twins. Rows in every phase of deferred states take
seconds in every mode: a quick run keeps at most three kinds for each implementation. Sizes that are left to a GPU are
compiled there, and not interpreted.
"""

import depth

PHASES = ("test_rows_in_every_phase_match_the_oracle", "test_rows_with_a_decay_per_key_channel_match_the_oracle")


def pytest_collection_modifyitems(config, items):
    is_left = lambda item: item.get_closest_marker("gpu") and depth.case(item, "implementation") == "interpret"
    left = [item for item in items if item.path.parent.name == "kernels" and is_left(item)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]
    ours = [item for item in items if item.path.parent.name == "kernels"]
    depth.keep_first([item for item in ours if depth.case(item, "implementation") == "interpret"])
    depth.keep_first([item for item in ours if item.name.startswith("test_update_with_a_window_of_one")])
    phases = [item for item in ours if item.originalname in PHASES]
    depth.keep_first(phases, per="implementation", count=3)
    variants = [item for item in ours if item.originalname == "test_every_variant_of_deferred_states_lowers"]
    depth.keep_first(variants, per="kda")
    lowered = [item for item in ours if item.path.name == "test_lowering.py" and depth.case(item, "op")]
    depth.keep_first(lowered, per="op")
