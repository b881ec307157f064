"""Which cases of the kernel tests leave a quick run.

Tracing and compiling a Triton kernel's body for the CPU ("interpret") takes seconds for each case. A quick run keeps the
first case of each test in interpret mode, and every case of the XLA twins.
"""

import depth


def pytest_collection_modifyitems(items):
    ours = [item for item in items if item.path.parent.name == "kernels"]
    depth.keep_first([item for item in ours if depth.case(item, "implementation") == "interpret"])
    depth.keep_first([item for item in ours if item.name.startswith("test_update_with_a_window_of_one")])
    lowered = [item for item in ours if item.path.name == "test_lowering.py" and depth.case(item, "op")]
    depth.keep_first(lowered, per="op")
