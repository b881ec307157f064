"""A plugin of pytest that keeps one case of each test and each kind of kernel: `-p one_each`, under slow tools.

It is the first case, which is a small one. Tests of large pools are left out, and so is what XLA makes of an op.
"""

import pytest

PARAMETERS = "implementation", "kernel"
NO_KERNELS = {"xla", "interpret", "by hand"}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    kept, seen = [], set()
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        kinds = [str(parameters.get(name)) for name in PARAMETERS]
        key = item.path, item.originalname, *kinds
        is_small = item.get_closest_marker("gpu") and not item.get_closest_marker("large_pool")
        if is_small and key not in seen and NO_KERNELS.isdisjoint(kinds):
            seen.add(key)
            kept.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
