"""Old names that keep working for one release, each with a DeprecationWarning.

This is the only file that knows them. It imports no JAX, because modules that work without JAX use it. To drop the old names
in the next release, delete this file, its uses, and tests/test_deprecated.py.
"""

import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import operator
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Old module paths, and the modules that hold their names now.
MODULES: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "mamba_align_jax.spec": ("mamba_align_jax.align.config",),
        "mamba_align_jax.pool": ("mamba_align_jax.align.pool",),
        "mamba_align_jax.align.host": ("mamba_align_jax.vllm_compat.mamba_utils", "mamba_align_jax.align.interior"),
        "mamba_align_jax.align.staging": ("mamba_align_jax.vllm_compat.staging",),
        "mamba_align_jax.metadata.kinds": ("mamba_align_jax.vllm_compat.row_kinds",),
        "mamba_align_jax.metadata.tokens": ("mamba_align_jax.vllm_compat.token_split",),
        "mamba_align_jax.metadata.block_idx": (
            "mamba_align_jax.vllm_compat.block_idx",
            "mamba_align_jax.align.interior",
        ),
        "mamba_align_jax.metadata.attention": (
            "mamba_align_jax.metadata.step_inputs",
            "mamba_align_jax.metadata.layer_step",
        ),
        "mamba_align_jax.models.checkpoint": ("mamba_align_jax.models.weights", "mamba_align_jax.models.sources"),
        "mamba_align_jax.engine.demo": ("mamba_align_jax.demo",),
        "mamba_align_jax.engine.device_drafting": (
            "mamba_align_jax.engine.drafting.prompt_lookup_device",
            "mamba_align_jax.engine.drafting",
        ),
        "mamba_align_jax.engine.block_size": ("mamba_align_jax.engine.block_size_warning",),
        "mamba_align_jax.engine.mtp_drafting": ("mamba_align_jax.engine.drafting.mtp",),
    }
)
# Names of those modules that have changed as well, by (old module, old name).
NAMES: Mapping[tuple[str, str], str] = types.MappingProxyType(
    {
        ("mamba_align_jax.models.checkpoint", "save_checkpoint"): "save_weights",
        ("mamba_align_jax.engine.device_drafting", "NGramLookup"): "DevicePromptLookup",
        ("mamba_align_jax.engine.demo", "MODES"): "COMPARED_MODES",
        ("mamba_align_jax.engine.demo", "Run"): "ModeResult",
        ("mamba_align_jax.engine.demo", "Workload"): "DemoConversation",
    }
)


def _warn(text: str, stacklevel: int) -> None:
    warnings.warn(f"{text}; the old one goes in the next release", DeprecationWarning, stacklevel=stacklevel + 1)


class _OldModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the modules of `MODULES`: an old module forwards each name to the module that holds it now."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in MODULES else None

    def exec_module(self, module: types.ModuleType) -> None:
        old, new = module.__name__, MODULES[module.__name__]
        # Python leaves the frames of its import machinery out of the count, so this names the import statement.
        _warn(f"module {old} is now {' and '.join(new)}", stacklevel=2)

        def find(name: str) -> Any:
            for holder in () if name.startswith("__") else map(importlib.import_module, new):
                if hasattr(holder, wanted := NAMES.get((old, name), name)):
                    return getattr(holder, wanted)
            raise AttributeError(f"module {old!r} has no attribute {name!r}")

        setattr(module, "__getattr__", find)  # noqa: B010 - type checkers know no such attribute of a module


def install_old_modules() -> None:
    """Makes the old module paths importable. `mamba_align_jax/__init__.py` calls it once."""
    if not any(isinstance(finder, _OldModules) for finder in sys.meta_path):
        sys.meta_path.append(_OldModules())


def renamed_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module-level `__getattr__` for old names of `module`.

    Args:
        module: Its name, `__name__`.
        names: By the old name, where the new one is: "package.module:Name".
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        place, new = names[name].split(":")
        _warn(f"{module}.{name} is now {place}.{new}", stacklevel=2)
        return getattr(importlib.import_module(place), new)

    return find


def _with_new_keywords(called: str, names: Mapping[str, str], keywords: dict[str, Any]) -> dict[str, Any]:
    for old in names.keys() & keywords.keys():
        _warn(f"{called}: keyword {old!r} is now {names[old]!r}", stacklevel=3)
    return {names.get(name, name): value for name, value in keywords.items() if name not in names} | {
        names[old]: keywords[old] for old in names.keys() & keywords.keys()
    }


def renamed_keywords(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Makes a function accept old keywords as well: `renamed_keywords(old="new")`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def wrapper(*arguments: Any, **keywords: Any) -> T:
            if not keywords.keys().isdisjoint(names):
                keywords = _with_new_keywords(function.__qualname__, names, keywords)
            return function(*arguments, **keywords)

        return wrapper

    return decorate


def renamed_fields(**names: str) -> Callable[[type[T]], type[T]]:
    """Makes a class accept old fields as well, as keywords and as attributes: `renamed_fields(old="new")`.

    It goes above `dataclass`, or above a NamedTuple, and changes the class in place. `dataclasses.replace` takes the old
    names, too. A new name may lead through another field, as "pages.positions": the old one is then an attribute only.
    """

    def decorate(cls: type[T]) -> type[T]:
        is_tuple = issubclass(cls, tuple)
        make: Any = cls.__new__ if is_tuple else cls.__init__
        keyword_names = {old: new for old, new in names.items() if "." not in new}

        @functools.wraps(make)
        def accept(self: Any, *arguments: Any, **keywords: Any) -> Any:
            if keyword_names.keys() & keywords.keys():
                keywords = _with_new_keywords(cls.__name__, keyword_names, keywords)
            return make(self, *arguments, **keywords)

        setattr(cls, "__new__" if is_tuple else "__init__", accept)
        for old, new in names.items():
            setattr(cls, old, _old_attribute(cls.__name__, old, new))
        return cls

    return decorate


def _old_attribute(owner: str, old: str, new: str) -> property:
    def get(self: Any) -> Any:
        _warn(f"{owner}.{old} is now {owner}.{new}", stacklevel=2)
        return operator.attrgetter(new)(self)

    return property(get, doc=f"The old name of `{new}`.")


def old_mixer_call(call: Callable[P, T]) -> Callable[P, T]:
    """Makes a mixer's `__call__(x, at, *pools)` accept the arguments that it had before `LayerStep`.

    They were `(x, split, chunks, *pools, layer, group=, num_decode_tokens=, implementation=)`, and of attention layers
    `(x, step_inputs, keys, values, layer)`.
    """
    forward: Callable[..., T] = call

    @functools.wraps(call)
    def wrapper(self: Any, x: Any, *arguments: Any, **keywords: Any) -> T:
        from mamba_align_jax.metadata.layer_step import LayerStep
        from mamba_align_jax.metadata.rows import RowSplit
        from mamba_align_jax.metadata.step_inputs import StepInputs

        if not arguments or not isinstance(arguments[0], RowSplit | StepInputs):
            return forward(self, x, *arguments, **keywords)
        _warn(f"the arguments of {type(self).__name__} are now (x, LayerStep, *pools)", stacklevel=2)
        first, *rest, layer = arguments
        if isinstance(first, StepInputs):
            return forward(self, x, first.layer(layer), *rest)
        split = dataclasses.replace(first, num_decode_tokens=keywords.pop("num_decode_tokens", None))
        chunks, *pools = rest
        return forward(self, x, LayerStep(rows=split, chunks=chunks, layer=layer, **keywords), *pools)

    return wrapper


def sigmoid_router(logits: Any, bias: Any, top_k: int, **options: Any) -> Any:
    """`choose_experts` with the arguments that `layers.moe.sigmoid_router` had."""
    from pallas_kernels import choose_experts

    return choose_experts(logits, top_k, scores="sigmoid", bias=bias, **options)


def dropped_fields(**derive: Callable[[Any], Any]) -> Callable[[type[T]], type[T]]:
    """Makes a dataclass accept fields that it no longer has. Their values are ignored.

    Args:
        derive: By the old field's name, a function that computes the old attribute from an instance.
    """

    def decorate(cls: type[T]) -> type[T]:
        make: Any = cls.__init__

        @functools.wraps(make)
        def accept(self: Any, *arguments: Any, **keywords: Any) -> Any:
            for name in derive.keys() & keywords.keys():
                warn_dropped(f"{cls.__name__}: field {name!r}", stacklevel=2)
                del keywords[name]
            return make(self, *arguments, **keywords)

        setattr(cls, "__init__", accept)  # noqa: B010 - type checkers allow no assignment to it
        for name, function in derive.items():
            setattr(cls, name, _dropped_attribute(cls.__name__, name, function))
        return cls

    return decorate


def _dropped_attribute(owner: str, name: str, derive: Callable[[Any], Any]) -> property:
    def get(self: Any) -> Any:
        warn_dropped(f"{owner}.{name}", stacklevel=2)
        return derive(self)

    return property(get, doc="A field that goes in the next release.")


def warn_dropped(what: str, stacklevel: int = 2) -> None:
    """Warns that `what` has no use any more. `stacklevel` counts as in `warnings.warn`, from the caller of this function."""
    warnings.warn(f"{what} has no use and goes in the next release", DeprecationWarning, stacklevel=stacklevel + 1)


def renamed_value(argument: str, value: T, names: Mapping[T, T]) -> T:
    """The new value for an old one: `renamed_value("speculation", value, {"ngram": "prompt_lookup"})`.

    A dataclass calls it in `__post_init__`, so that the warning names the line that makes the instance.
    """
    if value not in names:
        return value
    _warn(f"{argument}={value!r} is now {argument}={names[value]!r}", stacklevel=4)
    return names[value]
