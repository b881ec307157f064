"""What every test run needs before JAX starts: environment, compilation cache, depth, and warnings that are errors."""

import gc
import importlib.util
import math
import os
import shutil
import tempfile
import warnings

# OpenBLAS' threads wait for each other a thousand times longer than the triangular system of a chunk takes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Each process would otherwise take three quarters of a GPU's memory, and the second process of `-n` would get nothing.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import depth
import gpu.cases
import gpu.files
import jax
import numpy as np
import pytest
import quick
from hypothesis import Phase, settings

jax.config.update("jax_numpy_dtype_promotion", "strict")

# Each program is compiled once in a run: processes share what they compile. The environment is for the workers of `-n` and
# for processes that tests start; a plugin may have imported JAX here, which has read the environment then.
NEW_CACHE = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    NEW_CACHE = tempfile.mkdtemp(prefix="mamba_align_jax_tests_")
    for name, value in (
        ("jax_compilation_cache_dir", NEW_CACHE),
        ("jax_persistent_cache_min_compile_time_secs", 0),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
    ):
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)

# On a CPU, optimizing the programs takes longer than running them. JAX_DISABLE_MOST_OPTIMIZATIONS=0 compiles as users do.
QUICK = "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ
if QUICK and jax.__version_info__ < (0, 11):
    # This saves the compiler of JAX 0.10 a third of its time. Later compilers don't know the flag.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"

# For --hypothesis-profile: it reports that a test fails, and doesn't look for the smallest example.
settings.register_profile("no_shrinking", phases=[Phase.explicit, Phase.generate], database=None)

EXPECTED_WARNINGS = (
    # JAX has deprecated Pallas Triton since 0.11. `pallas_kernels/_pallas_triton.py` is the single place to replace it.
    ("The Pallas Triton backend is deprecated", DeprecationWarning),
    # JAX reads an entry of the compilation cache while another process writes it, and then compiles the program itself.
    ("Error reading persistent compilation cache entry", UserWarning),
)

# The files that take longest, in this order. A worker that starts one late would run it alone at the end.
SLOWEST = (
    *("test_random_calls.py", "test_chained_decoding.py"),
    *("test_sharding.py", "test_mamba_models.py", "test_processes.py", "test_machine.py", "test_generation.py"),
    *(
        "test_reference.py",
        "test_engine.py",
        "test_mtp.py",
        "test_speculation.py",
        "test_deferred.py",
        "test_donation.py",
    ),
    *("test_gated_delta_rule.py", "test_gated_delta_rule_prefill.py", "test_kimi.py", "test_delta_nets.py"),
    *("test_command.py", "test_readme.py", "test_ssd.py", "test_causal_conv1d.py", "test_lowering.py"),
    *("test_pipeline.py", "test_serving.py", "test_train_byte_model.py", "test_soak.py", "test_cli.py"),
)


# Folders whose modules have the same engines, and so the same programs: at all depths, and on a CPU at the quick one, where
# there are so few programs that a process may hold them.
SHARED_PROGRAMS, SHARED_BY_FEW = ("serve",), ("engine", "failures")
NO_TIME = "no time is left for deep tests"

# Without the extra `serve`, as on a machine that only has the core's dependencies, the server's tests are left out.
collect_ignore = [] if importlib.util.find_spec("starlette") else ["serve"]


def pytest_report_header():
    """Says what is left out."""
    return ["tests/serve is left out: the extra `serve` is not installed"] if collect_ignore else []


def pytest_addoption(parser):
    parser.addoption(
        "--depth",
        choices=("quick", "cases", "full"),
        default="quick",
        help="quick: short searches, and some cases of each test; cases: short searches, and the cases that tests/quick.py "
        "leaves out; full: everything, as `make test-all` runs",
    )
    parser.addoption(
        "--deep-minutes",
        type=float,
        default=math.inf,
        help="a full run goes on as a quick one after so many minutes, and skips the deep tests that are left",
    )
    parser.addoption(
        "--file-order",
        metavar="TEXT",
        help="runs the files in an order that is drawn from this text, instead of the slowest ones first. With "
        "--deep-minutes, other deep tests are left out with each text",
    )
    parser.addoption(
        "--browser",
        choices=("optional", "required"),
        default="optional",
        help="required: the tests of the server's page fail without a browser, instead of being skipped",
    )


def pytest_configure(config):
    depth.set_full(config.getoption("depth") == "full", 60 * config.getoption("deep_minutes"))


def pytest_unconfigure(config):
    if NEW_CACHE:
        shutil.rmtree(NEW_CACHE, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Makes a warning an error while a test module is imported."""
    if not isinstance(collector, pytest.Module):
        return (yield)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for message, category in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message, category)
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Makes a warning an error while a test runs, leaves out what can't run here, and orders the files.

    GPU tests are left out where JAX sees no GPU, deep tests from a quick run, and tests that their marker `skipif` would
    skip. pytest counts them as deselected.

    The setting `filterwarnings = error` would also hold while pytest starts and ends. A warning of any plugin that is
    installed would then end the run.
    """
    on_gpu, is_full = jax.default_backend() == "gpu", config.getoption("depth") == "full"
    if config.getoption("depth") != "cases":
        quick.mark(items)
        if on_gpu:
            gpu.cases.mark(items)
    expected = [f"ignore:{message}:{category.__name__}" for message, category in EXPECTED_WARNINGS]
    strict = pytest.mark.filterwarnings("error", *expected)
    for item in items:
        # The item's keywords would not do: the name of a folder is a keyword.
        if item.get_closest_marker("gpu") and not gpu.files.may_have_gpu_tests(item.path):
            raise pytest.UsageError(f"tests/gpu/files.py does not find {item.path}, which has the GPU test {item.name}")

    # Sizes that are left to a GPU are compiled there, and not interpreted.
    def runs(item):
        can_run = not item.get_closest_marker("gpu") or (on_gpu and gpu.cases.is_compiled(item))
        return can_run and not quick.is_skipped(item) and (is_full or not item.get_closest_marker("deep"))

    left_out = [item for item in items if not runs(item)]
    config.stash[quick.LEFT_OUT] = left_out
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if runs(item)]
    if order := config.getoption("file_order"):
        items.sort(key=lambda item: depth.place(item.path.relative_to(config.rootpath), order))
    else:
        items.sort(key=lambda item: SLOWEST.index(item.path.name) if item.path.name in SLOWEST else len(SLOWEST))
    for item in items:
        # pytest applies the first marker first, and a later filter wins: a test's own filters come after this one.
        item.add_marker(strict, append=False)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Spares the garbage collector the modules and tests, which stay: it would look at them again every few seconds."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skips a deep test of a full run that has become a quick one. A quick run has left it out before."""
    if item.get_closest_marker("deep") and not item.get_closest_marker("gpu") and not depth.is_full():
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter, config):
    """Says how much CPU time the run took with its processes, and how many deep tests were left out for want of time."""
    user, system, of_children, system_of_children, _ = os.times()
    terminalreporter.write_line(f"{user + system + of_children + system_of_children:.0f} s of CPU time")
    late = sum(NO_TIME in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ()))
    if late:
        minutes = config.getoption("deep_minutes")
        terminalreporter.write_line(f"{late} deep tests were left out, because {minutes:g} minutes had passed")


@pytest.fixture(scope="module", autouse=True)
def programs(request):
    """Sets how a module's programs are compiled, and drops them after the module."""
    if QUICK and jax.default_backend() == "cpu":
        jax.config.update("jax_disable_most_optimizations", True)
    yield
    # A program holds memory maps, of which Linux gives a process 65,530. The programs of the whole suite need more,
    # and XLA crashes when they run out.
    is_quick = jax.default_backend() == "cpu" and not depth.is_full()
    if request.path.parent.name not in (*SHARED_PROGRAMS, *(SHARED_BY_FEW if is_quick else ())):
        jax.clear_caches()


@pytest.fixture
def optimized_programs():
    """Compiles as users do, for tests that look at what the compiler makes of a program or that run for long."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def one_program():
    """Gives an engine one program for all its steps, whatever rows they have, where compiling takes longer than padding."""
    with pytest.MonkeyPatch.context() as patch:
        give_programs(patch, lambda module, *sizes: [module.Bucket(*sizes)])
        yield


@pytest.fixture(scope="module")
def few_programs():
    """Gives an engine two programs at the quick depth, for steps with and without prompts, and all at the full depth."""
    with pytest.MonkeyPatch.context() as patch:
        if not depth.is_full():
            two = lambda module, seqs, *prefill: [module.Bucket(seqs, *prefill), module.Bucket(seqs, 0, 0)]
            give_programs(patch, two)
        yield


@pytest.fixture(scope="module")
def fewest_programs():
    """Gives an engine one program at the quick depth, and all its programs at the full depth."""
    with pytest.MonkeyPatch.context() as patch:
        if not depth.is_full():
            give_programs(patch, lambda module, *sizes: [module.Bucket(*sizes)])
        yield


@pytest.fixture
def every_program(monkeypatch):
    """Gives an engine all its programs in a module that uses `few_programs` or `fewest_programs`."""
    give_programs(monkeypatch, lambda module, *sizes: module.all_buckets(*sizes))


def give_programs(patch, buckets):
    """Sets the sizes of an engine's programs to `buckets(module, requests, prefill rows, prefill tokens)`."""
    trace_for_a_cpu_alone(patch)
    from mamba_align_jax.engine.device import runner
    from mamba_align_jax.engine.scheduling import buckets as module

    make = lambda self: buckets(module, self.align.max_num_seqs, self.max_prefill_rows, self.max_num_batched_tokens)
    patch.setattr(runner.StepRunner, "buckets", property(make))


@pytest.fixture(scope="module")
def for_a_cpu_alone():
    """Traces for a CPU alone where a quick run has no GPU, for modules that run models and layers."""
    with pytest.MonkeyPatch.context() as patch:
        trace_for_a_cpu_alone(patch)
        yield


def trace_for_a_cpu_alone(patch):
    """Lets a quick run on a CPU trace what the CPU runs: tracing the kernels for GPUs too takes twice as long."""
    if jax.default_backend() == "cpu" and not depth.is_full():
        patch.setattr(jax.lax, "platform_dependent", lambda *operands, default, **others: default(*operands))


@pytest.fixture
def rng():
    return np.random.default_rng(0)
