"""The rooms of the house: which package may import which, no circles, no private imports, short functions."""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = ("mamba_align_jax", "pallas_kernels", "benchmarks", "examples")
# A room is a top-level package, or a file or folder of mamba_align_jax. Each may import itself and the rooms named here,
# whose order is from the foundation up: no room imports a later one.
MAY_IMPORT = {
    "pallas_kernels": (),
    "mamba_align_jax.errors": (),
    "mamba_align_jax._values": ("mamba_align_jax.errors",),
    "mamba_align_jax._options": (),
    "mamba_align_jax.data": (),
    "mamba_align_jax.align": ("pallas_kernels", "mamba_align_jax.errors", "mamba_align_jax._values"),
    "mamba_align_jax.kv": ("mamba_align_jax._values", "mamba_align_jax.align"),
    "mamba_align_jax.cache": ("mamba_align_jax.align", "mamba_align_jax._values"),
    "mamba_align_jax.metadata": ("pallas_kernels", "mamba_align_jax._values", "mamba_align_jax.align"),
    "mamba_align_jax.sharding": ("mamba_align_jax.align", "mamba_align_jax.kv"),
    "mamba_align_jax.vllm_compat": ("pallas_kernels", "mamba_align_jax.align"),
    "mamba_align_jax.layers": (
        "pallas_kernels",
        "mamba_align_jax._values",
        "mamba_align_jax.align",
        "mamba_align_jax.metadata",
        "mamba_align_jax.sharding",
    ),
    "mamba_align_jax.models": (
        "pallas_kernels",
        "mamba_align_jax.errors",
        "mamba_align_jax._values",
        "mamba_align_jax.align",
        "mamba_align_jax.kv",
        "mamba_align_jax.metadata",
        "mamba_align_jax.sharding",
        "mamba_align_jax.layers",
    ),
    "mamba_align_jax.engine": (
        "pallas_kernels",
        "mamba_align_jax._values",
        "mamba_align_jax._options",
        "mamba_align_jax.errors",
        "mamba_align_jax.align",
        "mamba_align_jax.kv",
        "mamba_align_jax.cache",
        "mamba_align_jax.metadata",
        "mamba_align_jax.sharding",
        "mamba_align_jax.layers",
        "mamba_align_jax.models",
    ),
    # The names of the package itself, which it imports on first use.
    "mamba_align_jax": (
        "mamba_align_jax.align",
        "mamba_align_jax.kv",
        "mamba_align_jax.cache",
        "mamba_align_jax.metadata",
        "mamba_align_jax.layers",
        "mamba_align_jax.engine",
    ),
    "mamba_align_jax.processes": (
        "mamba_align_jax._values",
        "mamba_align_jax.errors",
        "mamba_align_jax.sharding",
        "mamba_align_jax.engine",
    ),
    "mamba_align_jax.routing": ("mamba_align_jax._values", "mamba_align_jax.cache"),
    "mamba_align_jax.serve": (
        "mamba_align_jax",
        "mamba_align_jax._values",
        "mamba_align_jax._options",
        "mamba_align_jax.errors",
        "mamba_align_jax.cache",
        "mamba_align_jax.models",
        "mamba_align_jax.engine",
    ),
    "mamba_align_jax.load": ("mamba_align_jax._values", "mamba_align_jax.engine"),
    "mamba_align_jax.integrations": ("pallas_kernels", "mamba_align_jax.engine"),
    "mamba_align_jax.cli": (
        "mamba_align_jax",
        "mamba_align_jax._values",
        "mamba_align_jax.errors",
        "mamba_align_jax.data",
        "mamba_align_jax.engine",
        "mamba_align_jax.models",
        "mamba_align_jax.processes",
        "mamba_align_jax.sharding",
        "mamba_align_jax.serve",
        "mamba_align_jax.load",
    ),
    "mamba_align_jax.__main__": ("mamba_align_jax", "mamba_align_jax.cli"),
}


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for package in CODE for path in sorted((ROOT / package).rglob("*.py"))}


def room_of(module):
    """The room of a module: its first two names, or the package alone."""
    for size in (2, 1):
        room = ".".join(module.split(".")[:size])
        if room in MAY_IMPORT:
            return room
    return None


def imports_of(module):
    """The modules of this repository that a module imports, anywhere in its text, with the names it takes from them."""
    return imports_in(MODULES[module])


@functools.cache
def tree_of(file):
    return ast.parse(file.read_text())


@pytest.fixture(scope="module", autouse=True)
def trees():
    """Forgets the trees after this module: the garbage collector would visit them as long as the process runs."""
    yield
    tree_of.cache_clear()
    classes.cache_clear()


@functools.cache
def imports_in(file):
    found = []
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.append((whole, None) if whole in MODULES else (node.module, alias.name))
    return [(name, taken) for name, taken in found if name.split(".")[0] in CODE]


def violations(files, found_in):
    """What `found_in` finds in each of `files`, by file, without those in which it finds nothing.

    There are so many files that a test for each would cost more than what it checks.
    """
    return {file: found for file in files if (found := found_in(file))}


def test_every_module_belongs_to_a_room():
    homeless = [module for module in MODULES if module.split(".")[0] in CODE[:2] and room_of(module) is None]
    assert not homeless


def test_rooms_import_earlier_rooms_alone():
    order = list(MAY_IMPORT)
    for room, allowed in MAY_IMPORT.items():
        assert all(order.index(other) < order.index(room) for other in allowed), room


def test_a_module_imports_what_its_room_may():
    rooms = {module: room_of(module) for module in MODULES if room_of(module)}
    reached = {module: {room_of(name) for name, _ in imports_of(module)} - {room} for module, room in rooms.items()}
    assert violations(rooms, lambda module: reached[module] - set(MAY_IMPORT[rooms[module]])) == {}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_uses_every_arrow_that_it_has(room):
    reached = {room_of(name) for module in MODULES if room_of(module) == room for name, _ in imports_of(module)}
    assert set(MAY_IMPORT[room]) <= reached


# The rooms of the engine, from the foundation up, with the rooms of the engine that each may import.
ENGINE = "mamba_align_jax.engine"
ENGINE_ROOMS = {
    "grammar": (),
    "interrupts": (),
    "turns": (),
    "tenants": (),
    "fair_thread": ("tenants",),
    "model": (),
    "reference": (),
    "config": ("grammar",),
    "text": ("grammar", "interrupts", "turns"),
    "drafting": ("interrupts", "model", "config"),
    "scheduling": ("interrupts", "tenants", "fair_thread", "config", "text", "drafting"),
    "sampling": ("model", "config", "scheduling"),
    "device": ("interrupts", "model", "config", "text", "drafting", "scheduling", "sampling"),
    "running": ("interrupts", "turns", "model", "config", "text", "drafting", "scheduling", "device"),
}
# The rooms of the server, in the same way.
SERVER_ROOMS = {
    "replies": (),
    "settings": ("replies",),
    "refusals": (),
    "long_answers": ("refusals",),
    "metrics": (),
    "keys": ("refusals",),
    "limits": ("settings", "refusals"),
    "api": ("replies", "settings", "refusals", "long_answers", "metrics", "keys", "limits"),
    "page": ("api",),
    "events": (),
    "vllm_flags": ("settings",),
    "app": ("settings", "refusals", "limits", "api", "page"),
    "server": ("settings", "limits"),
    "command": ("settings", "events", "vllm_flags", "app", "server"),
}
INNER_ROOMS = {ENGINE: ENGINE_ROOMS, "mamba_align_jax.serve": SERVER_ROOMS}


def inner_room_of(package, module):
    """The room of a module within a package that has rooms; None if it is in another package."""
    return module.removeprefix(f"{package}.").split(".")[0] if module.startswith(f"{package}.") else None


@pytest.mark.parametrize(
    ("package", "room"), [(package, room) for package in INNER_ROOMS for room in INNER_ROOMS[package]]
)
def test_a_room_within_a_package_imports_the_rooms_below_it_that_it_names(package, room):
    rooms = INNER_ROOMS[package]
    modules = [module for module in MODULES if inner_room_of(package, module) == room]
    reached = {inner_room_of(package, name) for module in modules for name, _ in imports_of(module)} - {room, None}
    assert modules
    assert reached == set(rooms[room])
    order = list(rooms)
    assert all(order.index(other) < order.index(room) for other in reached)


@pytest.mark.parametrize("package", INNER_ROOMS)
def test_every_module_of_a_package_with_rooms_is_in_one(package):
    assert {inner_room_of(package, module) for module in MODULES} - {None} == set(INNER_ROOMS[package])


# Public packages that stand beside the core. Only the command line may start one of them.
SATELLITES = {f"mamba_align_jax.{name}" for name in ("vllm_compat", "integrations", "routing", "processes")}
STARTS_SATELLITES = {"mamba_align_jax.cli"}


@pytest.mark.parametrize("room", [room for room in MAY_IMPORT if room not in SATELLITES | STARTS_SATELLITES])
def test_no_room_but_the_command_line_may_import_a_satellite(room):
    assert not SATELLITES & set(MAY_IMPORT[room])


def circle_in(graph):
    """The modules of a circle of imports, in order and with the first repeated at the end, or None if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as found:
        return found.args[1]
    return None


def test_no_module_is_in_a_circle():
    # A package's `__init__.py` may take names from itself.
    circle = circle_in({module: {name for name, _ in imports_of(module)} - {module} for module in MODULES})
    assert circle is None, f"circle: {' -> '.join(circle)}"


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("mamba_align_jax._values", "mamba_align_jax.cli.commands"),
        ("mamba_align_jax.align.columns", "mamba_align_jax.engine.running.core"),
        ("pallas_kernels.dispatch", "pallas_kernels"),
    ],
)
def test_a_planted_circle_is_seen(monkeypatch, tmp_path, module, imported):
    file = tmp_path / "module.py"
    file.write_text(f"{MODULES[module].read_text()}\n\ndef late():\n    import {imported}\n")
    monkeypatch.setitem(MODULES, module, file)
    with pytest.raises(AssertionError, match=f"circle: .*{re.escape(imported)}"):
        test_no_module_is_in_a_circle()


def package_of(module):
    """The package that a private name belongs to: a folder of ours, or a top-level package."""
    return module.rsplit(".", 1)[0] if module in MODULES and MODULES[module].name != "__init__.py" else module


def private_imports(module):
    """The private modules of other packages that a module imports, and the private names that it takes from them."""
    for name, taken in imports_of(module):
        private = [part for part in name.split(".") if part.startswith("_")]
        if private and module.split(".")[0] != name.split(".")[0]:
            yield name
        if taken and is_private(taken) and package_of(module) != package_of(name):
            yield f"{name}.{taken}"


def test_a_module_imports_no_private_module_of_another_package():
    assert violations(MODULES, lambda module: list(private_imports(module))) == {}


# What begins with an underscore and is public: the methods of a NamedTuple, and these of other people's libraries, by the
# module that may use them.
OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
OF_OTHERS = {
    "mamba_align_jax.engine.turns": {"self._lock._is_owned", "lock._is_owned"},  # no public name says who has an RLock
    "mamba_align_jax.integrations.sglang_jax": {"pool._to_physical"},
    "mamba_align_jax.integrations.sglang_jax_speculation": {
        "request._check_token_based_finish",
        "runner._init_pools",
    },
    "mamba_align_jax.processes.group": {"os._exit"},
    # The type of what a public method returns.
    "mamba_align_jax._options": {"argparse._ArgumentGroup"},
    "mamba_align_jax.serve.command": {"argparse._ArgumentGroup"},
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def members_of(owner):
    """The private names that a class defines: its methods, its fields, and what its methods assign to `self`."""
    private = [node for node in ast.walk(owner) if isinstance(node, ast.Attribute) and is_private(node.attr)]
    stored = [node for node in private if isinstance(node.ctx, ast.Store)]
    names = {node.attr for node in stored if ast.unparse(node.value) == "self"}
    for node in owner.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if is_private(name)}


def private_uses(node, members=None):
    """The private attributes that code uses of objects of other classes, as text.

    Args:
        node: The code.
        members: The private names of the class that the code is in; None outside of classes.
    """
    if isinstance(node, ast.ClassDef):
        members = members_of(node)
    elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in OF_NAMED_TUPLES:
        owner = ast.unparse(node.value)
        # A method may know another object of its class: by a name of its own, and only what the class defines.
        is_own = isinstance(node.value, ast.Name) and node.attr in (members or ())
        if members is None or not (owner in ("self", "cls", "super()") or is_own):
            yield ast.unparse(node)
    elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("getattr", "setattr", "hasattr", "delattr"):
        name = node.args[1] if len(node.args) > 1 else None
        if isinstance(name, ast.Constant) and is_private(name.value):
            yield ast.unparse(node)
    for child in ast.iter_child_nodes(node):
        yield from private_uses(child, members)


def test_a_class_uses_no_private_attribute_of_another():
    modules = [name for name in MODULES if name.startswith(CODE[:2])]
    assert violations(modules, lambda module: set(private_uses(tree_of(MODULES[module])))) == OF_OTHERS


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("engine._requests", ["engine._requests"]),
        ("def f(self):\n    self._x", ["self._x"]),
        ("class A:\n    def f(self):\n        self._b._x = 1", ["self._b._x"]),
        ("class A:\n    def _x(self):\n        self.b._x()", ["self.b._x"]),
        ("class A:\n    def f(self, b):\n        return b._x", ["b._x"]),
        ("getattr(engine, '_x', None)", ["getattr(engine, '_x', None)"]),
        ("class A:\n    def f(self, other):\n        self._x = other._x", []),
        ("class A(B):\n    def f(self):\n        super()._x()", []),
        ("pair._replace(a=1).__class__", []),
    ],
)
def test_uses_of_private_attributes_are_seen(text, found):
    assert list(private_uses(ast.parse(text))) == found


@functools.cache
def classes():
    """The classes of the packages by their module and name."""
    return {
        (module, node.name): node
        for module in MODULES
        if module.startswith(CODE[:2])
        for node in tree_of(MODULES[module]).body
        if isinstance(node, ast.ClassDef)
    }


def shared_private_names(owner, base):
    """The private names of a base that a class uses or replaces."""
    used = [node for node in ast.walk(owner) if isinstance(node, ast.Attribute) and is_private(node.attr)]
    names = {node.attr for node in used if ast.unparse(node.value) in ("self", "cls", "super()")}
    return (names | members_of(owner)) & members_of(base)


def names_shared_with_bases(place):
    """The private names that the class at a place, its module and name, shares with its bases in other modules."""
    owner, taken = classes()[place], {alias: (other, alias) for other, alias in imports_of(place[0])}
    bases = [classes()[taken[base]] for base in map(ast.unparse, owner.bases) if taken.get(base) in classes()]
    return set().union(*(shared_private_names(owner, base) for base in bases))


def test_a_class_shares_no_private_name_with_a_base_of_another_module():
    """What a class offers to classes that extend it elsewhere has public names."""
    assert violations([place for place, node in classes().items() if node.bases], names_shared_with_bases) == {}


# Classes of one name: every file of a family of models has these, and is read by their names.
OF_FAMILIES = {"Config", "Layer", "MoE", "Model"}
# In the server a message has the name of the event that it carries.
OF_MESSAGES = {
    "StateStored": {"mamba_align_jax.cache.events", "mamba_align_jax.serve.events.stream"},
    "StateRemoved": {"mamba_align_jax.cache.events", "mamba_align_jax.serve.events.stream"},
}


def modules_by_class(modules):
    """The modules that define a class of each name, as often as they do. An underscore before it makes no other name."""
    found = {}
    for module in modules:
        for node in ast.walk(tree_of(MODULES[module])):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(module)
    return found


def test_no_two_classes_have_one_name():
    found = modules_by_class([module for module in MODULES if module.startswith("mamba_align_jax")])
    several = {name: modules for name, modules in found.items() if len(modules) > 1}
    families = {name: several.pop(name) for name in OF_FAMILIES}
    assert all(module.startswith("mamba_align_jax.models.") for modules in families.values() for module in modules)
    assert {name: set(modules) for name, modules in several.items()} == OF_MESSAGES


TESTS = [path for path in sorted((ROOT / "tests").rglob("*.py"))]


def private_modules_of_the_kernels(path):
    """The private modules of the kernels that a file imports."""
    if "pallas_kernels" not in (text := path.read_text()):
        return
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name for name in names if name.startswith("pallas_kernels._"))


def test_tests_import_no_private_module_of_the_kernels():
    assert violations(TESTS, lambda path: list(private_modules_of_the_kernels(path))) == {}


def lines_of(function):
    """The number of lines of a function's body, without its docstring."""
    first = function.body[1] if ast.get_docstring(function) and len(function.body) > 1 else function.body[0]
    return function.end_lineno - first.lineno + 1


IMPORT = re.compile(r"^ *(?:from ([\w.]+) )?import (\([^)]*\)|[^\n]+)", re.MULTILINE)


def imported_test_modules(text):
    """The test modules of this repository that a file imports, also in the code of a process that it starts."""
    found = []
    for package, names in IMPORT.findall(text):
        modules = [package, *(f"{package}.{name}" if package else name for name in re.findall(r"[\w.]+", names))]
        paths = [ROOT / "tests" / f"{module.replace('.', '/')}.py" for module in modules if module]
        found += [path.name for path in paths if path.name.startswith("test_") and path.exists()]
    return found


def test_nothing_imports_a_test_module():
    """What several tests need is in `oracles/`, `fakes/` or a helper module beside them."""
    assert violations(TESTS, lambda path: imported_test_modules(path.read_text())) == {}


@pytest.mark.parametrize(
    "line",
    [
        "from kernels.test_lowering import (\n    OPS,\n)",
        "from kernels import common, test_lowering",
        "from kernels import (\n    common,\n    test_lowering as lowering,\n)",
        "import kernels.test_lowering as lowering",
        'RUN = """\nfrom kernels import test_lowering\n"""',
    ],
)
def test_a_planted_import_of_a_test_module_is_seen(line):
    assert imported_test_modules(line) == ["test_lowering.py"]


def long_functions(module):
    functions = [node for node in ast.walk(tree_of(MODULES[module])) if isinstance(node, ast.FunctionDef)]
    return {function.name: lines_of(function) for function in functions if lines_of(function) > 75}


def test_a_function_fits_a_screen():
    """Bodies of kernels are cut into stages."""
    assert violations([name for name in MODULES if name.startswith(CODE[:2])], long_functions) == {}


def test_a_forbidden_import_is_seen():
    """The table is read: with one arrow less, the tests above would fail."""
    reached = {room_of(name) for name, _ in imports_of("mamba_align_jax.engine.running.core")}
    assert "mamba_align_jax.cache" in reached
    assert "mamba_align_jax.engine" not in {
        room_of(name)
        for module in MODULES
        if room_of(module) == "mamba_align_jax.models"
        for name, _ in imports_of(module)
    }


# Only these may name MLIR or write PTX: the language of Hopper kernels, and the gateway of Triton kernels with its own PTX.
GATEWAYS = ("pallas_kernels/hopper/", "pallas_kernels/_pallas_triton.py", "pallas_kernels/all_reduce/_ptx.py")
MLIR = re.compile(r"(^|\.)(mosaic|mosaic_gpu|triton)(\.|$)|^(jax\.extend|jaxlib)\.mlir(\.|$)|^jax\._src(\.|$)")
PTX = re.compile(
    r"\b(ld|st|mov|setp|red|atom|shfl|bar|redux|mma|ldmatrix|stmatrix|ex2|rcp)\.[a-z0-9.:]+|%tid|inline_asm"
)


def strings_and_names(nodes):
    """The texts in a module that are no docstrings, and the names of attributes."""
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value
        elif isinstance(node, ast.Attribute):
            yield node.attr


def mlir_and_ptx_in(tree):
    """The modules of MLIR, Mosaic GPU and Triton that a module imports, and its instructions of PTX."""
    nodes = list(ast.walk(tree))
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            imported += [f"{node.module}.{alias.name}" for alias in node.names]
    outside = [name for name in imported if not name.startswith(CODE) and MLIR.search(name)]
    return outside + [text for text in strings_and_names(nodes) if PTX.search(text) or text == "_registers"]


def test_only_the_gateways_name_mlir_or_write_ptx():
    others = [
        name
        for name in MODULES
        if name.startswith(CODE[:2]) and not str(MODULES[name].relative_to(ROOT)).startswith(GATEWAYS)
    ]
    assert violations(others, lambda module: mlir_and_ptx_in(tree_of(MODULES[module]))) == {}


@pytest.mark.parametrize(
    "text",
    [
        "from jax.extend.mlir.dialects import arith",
        "def late():\n    from jax.experimental.pallas import mosaic_gpu",
        "import jaxlib.mlir.ir",
        "text = 'mov.u32 $0, %tid.x;'",
        "x.registers = array._registers",
    ],
)
def test_mlir_and_ptx_are_seen(text):
    assert mlir_and_ptx_in(ast.parse(text))
