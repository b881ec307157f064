"""Checks of arguments' shapes and dtypes against their jaxtyping annotations, which raise ValueError."""

import dataclasses
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import AbstractArray, jaxtyped

P = ParamSpec("P")
R = TypeVar("R")
_INT32 = np.iinfo(np.int32)


class Arguments:
    """The base of dataclasses that group arguments of ops. `checked` checks their fields like arguments."""


class _Contract(NamedTuple):
    """The types of an argument: arrays of the annotations `arrays`, or instances of the classes `others`."""

    arrays: tuple[type[AbstractArray], ...]
    others: tuple[type, ...]

    @classmethod
    def of(cls, annotation: Any) -> "_Contract | None":
        """Return the contract of an annotation, or None if a member is no class, such as a Literal."""
        is_union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
        members = typing.get_args(annotation) if is_union else (annotation,)
        if not all(isinstance(member, type) for member in members):
            return None
        arrays = tuple(member for member in members if issubclass(member, AbstractArray))
        return cls(arrays, tuple(member for member in members if member not in arrays))

    @property
    def wanted(self) -> str:
        """The contract in words."""
        # A weight may be an array or a quantised one, of the same axes.
        arrays = dict.fromkeys(f"{a.dtype.__name__}[{a.dim_str}]" for a in self.arrays)
        return " or ".join([*arrays, *(o.__name__.replace("NoneType", "None") for o in self.others)])

    def to_array(self, value: np.ndarray) -> Any:
        """Return a NumPy array unchanged if the contract has NumPy arrays, else as a JAX array."""
        on_host = any(array.array_type is np.ndarray for array in self.arrays)
        return value if on_host else jnp.asarray(value)

    def admits(self, value: Any) -> bool:
        """Whether a value keeps the contract. Any real number is accepted for a float, but no bool for an int or a float."""
        if any(cls in self.others for cls in (int, float)) and isinstance(value, bool) and bool not in self.others:
            return False
        is_number = float in self.others and isinstance(value, numbers.Real)
        return is_number or isinstance(value, (*self.others, *self.arrays))

    def kept(self, op: str, argument: str, value: Any) -> Any:
        """Return a value that keeps the contract: `value`, or its equivalent in Python or JAX if it is of NumPy.

        Raises:
            ValueError: in the name of `op`, if neither keeps it.
        """
        if self.admits(value):
            return value
        is_one = int in self.others and isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iu"
        plain = value.item() if is_one else _plain(value, self.to_array)
        if not self.admits(plain):
            raise ValueError(f"{op}: {argument} must be {self.wanted}, got {_describe(value)}")
        return plain


def _plain(value: Any, to_array: Callable[[Any], Any]) -> Any:
    """Convert NumPy's arrays by `to_array`, and its integers and bools to Python's, if that keeps their values."""
    if isinstance(value, np.bool_ | np.integer):
        return value.item()
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind in "iu" and (not value.size or _INT32.min <= value.min() <= value.max() <= _INT32.max):
        return to_array(value.astype(np.int32))
    is_same_in_jax = value.dtype in (np.float32, np.float16, np.bool_) or value.dtype == jnp.bfloat16
    return to_array(value) if is_same_in_jax else value


def _describe(value: object) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        library = "jax" if isinstance(value, jax.Array) else type(value).__module__.split(".")[0]
        library = type(value).__name__ if library == "pallas_kernels" else library
        return f"{library} {value.dtype}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


@functools.cache
def _contracts_of(cls: type[Arguments]) -> dict[str, _Contract]:
    """Return the contracts of the fields of a dataclass. A field whose default is None may be None."""
    found = {}
    for field in dataclasses.fields(cast(Any, cls)):
        contract = _Contract.of(field.type)
        if contract is not None:
            is_optional = field.default is None and types.NoneType not in contract.others
            found[field.name] = (
                contract._replace(others=(*contract.others, types.NoneType)) if is_optional else contract
            )
    return found


class _Call:
    """The arguments of one call of an op, as they are checked.

    Attributes:
        op: The op's name.
        kept: Each argument, and each field of a group of arguments, by its name in messages: its contract and its value.
    """

    def __init__(self, op: str) -> None:
        self.op = op
        self.kept: dict[str, tuple[_Contract, Any]] = {}

    def check(self, name: str, contract: _Contract, value: Any) -> Any:
        """Return a value that keeps its contract, as do its fields if it groups arguments: see `_Contract.kept`."""
        value = contract.kept(self.op, name, value)
        if isinstance(value, Arguments):
            of_fields = _contracts_of(type(value)).items()
            given = {field: getattr(value, field) for field, _ in of_fields}
            kept = {field: self.check(f"{name}.{field}", wanted, given[field]) for field, wanted in of_fields}
            if any(kept[field] is not given[field] for field in kept):
                value = dataclasses.replace(cast(Any, value), **kept)
        self.kept[name] = contract, value
        return value

    def with_axis(self, axis: str) -> str | None:
        """Return the name of the first array argument whose contract begins with the axis `axis`, or None."""
        for name, (contract, value) in self.kept.items():
            if hasattr(value, "shape") and any(array.dim_str.split()[:1] == [axis] for array in contract.arrays):
                return name
        return None

    def check_relations(self) -> None:
        """Check the relations of the axes "rows" and "layers" that `checked` documents."""
        rows, bounds, pool = map(self.with_axis, ("rows", "rows_plus_1", "layers"))
        if rows and bounds:
            wanted, got = self.kept[rows][1].shape[0] + 1, self.kept[bounds][1].shape[0]
            message = f"{bounds} must have {wanted} entries, one more than {rows} has rows, got {got}"
            require(got == wanted, f"{self.op}: {message}")
        if pool:
            shape = list(self.kept[pool][1].shape)
            require(0 not in shape, f"{self.op}: {pool} must have no axis of length 0, got {shape}")
            for name, (_, value) in self.kept.items():
                if name.rpartition(".")[2] == "layer":
                    check_layer(self.op, value, shape[0], name)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Make `function` check its arguments against their annotations: arrays by jaxtyping, others by their classes.

    The fields of a dataclass of `Arguments` are checked like arguments. An axis name means the same size in all arguments
    of one call. The axis "rows_plus_1" has one entry more than the axis "rows", and a `layer` that is a Python int is in
    [0, layers). The check reads shapes and dtypes only, so it works on tracers, and a jitted caller pays for it at trace
    time only. NumPy arrays are accepted for JAX arrays, and NumPy scalars for integers.

    Raises:
        ValueError: from a call, if an argument breaks its annotation. The message names the argument, the wanted type
            and the given value.
    """
    signature = inspect.signature(function)
    contracts = {name: _Contract.of(parameter.annotation) for name, parameter in signature.parameters.items()}
    contracts = {name: contract for name, contract in contracts.items() if contract is not None}

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        call, given = _Call(function.__name__), bound.arguments
        with jaxtyped("context"):
            for name, contract in contracts.items():
                if name in given:
                    given[name] = call.check(name, contract, given[name])
        call.check_relations()
        return function(*bound.args, **bound.kwargs)

    return wrapper


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition` is true. For relations that an annotation cannot express."""
    if not condition:
        raise ValueError(message)


def check_argument(name: str, argument: str, value: Any, annotation: Any) -> Any:
    """Return an argument of op `name` that keeps its annotation, converted from NumPy as by `checked`.

    Raises:
        ValueError: neither `value` nor its equivalent outside of NumPy keeps the annotation.
    """
    contract = _Contract.of(annotation)
    assert contract is not None
    return contract.kept(name, argument, value)


def check_layer(name: str, layer: Any, layers: int, argument: str = "layer") -> None:
    """Raise ValueError, in the name of op `name`, if a layer that is a Python int is not in [0, layers)."""
    if isinstance(layer, int):
        require(0 <= layer < layers, f"{name}: {argument} must be in [0, {layers}), got {layer}")


def check_layout(name: str, layout: str, layouts: Any) -> None:
    """Raise ValueError, in the name of op `name`, unless `layout` is one of `layouts`, a Literal of two names."""
    first, second = typing.get_args(layouts)
    require(layout in (first, second), f"{name}: layout must be {first!r} or {second!r}, got {layout!r}")


def dtype_of(name: str, argument: str, value: str | None, default: Any) -> np.dtype:
    """Return the dtype named by an argument of op `name`; None is the dtype `default`.

    Raises:
        ValueError: `value` is not the name of a floating-point dtype.
    """
    if value is None:
        return jnp.dtype(default)
    message = f"{name}: {argument} must be the name of a floating-point dtype or None, got {value!r}"
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        raise ValueError(message) from None
    require(jnp.issubdtype(dtype, jnp.floating), message)
    return dtype


class LaunchConfig:
    """The base of dataclasses that are launch configurations, whose fields are checked.

    A subclass names its op, the fields that must be at least 1, and the fields that must be powers of two, with the least
    value of each. `num_warps` must be a power of two up to 32, and `num_stages` at least 1.

    Raises:
        ValueError: from the constructor, if a field has a value that is not allowed.
    """

    _op: ClassVar[str]
    _positive: ClassVar[tuple[str, ...]]
    _powers: ClassVar[dict[str, int]]

    def __init_subclass__(cls, *, op: str, positive: tuple[str, ...] = (), **powers: int) -> None:
        cls._op, cls._positive, cls._powers = op, positive, powers

    def __post_init__(self) -> None:
        for field, smallest in self._powers.items():
            self.require_power(field, smallest)
        warps = getattr(self, "num_warps", 1)
        is_right = 1 <= warps <= 32 and warps & (warps - 1) == 0
        require(is_right, f"{self._op}: config.num_warps must be a power of two up to 32, got {warps}")
        for field in (*self._positive, *(["num_stages"] if hasattr(self, "num_stages") else [])):
            value = getattr(self, field)
            require(value >= 1, f"{self._op}: config.{field} must be at least 1, got {value}")

    def require_power(self, field: str, smallest: int) -> None:
        """Raise ValueError unless a field is a power of two of at least `smallest`."""
        size = getattr(self, field)
        wanted = "a power of two" if smallest == 1 else f"a power of two of at least {smallest}"
        is_right = size >= smallest and size & (size - 1) == 0
        require(is_right, f"{self._op}: config.{field} must be {wanted}, got {size}")


def sizes_of(name: str, parts: Any, total: int) -> tuple[int, ...]:
    """Return the sizes of the arrays into which op `name` cuts `total` channels; None is one array.

    Raises:
        ValueError: `parts` is not None and not a sequence of positive integers whose sum is `total`.
    """
    if parts is None:
        return (total,)
    wanted = f"{name}: parts must be positive integers whose sum is {total}, got {parts!r}"
    require(isinstance(parts, Sequence) and not isinstance(parts, str | bytes), wanted)
    are_sizes = all(isinstance(size, int | np.integer) and not isinstance(size, bool) and size > 0 for size in parts)
    require(are_sizes and sum(parts) == total, wanted)
    return tuple(map(int, parts))


def check_ring(name: str, ring: str, ring_slots: int, max_query_tokens: int) -> None:
    """Raise ValueError, in the name of op `name`, unless rings of `ring_slots` entries suffice for `max_query_tokens`."""
    require(
        ring_slots >= 2 and ring_slots % 2 == 0,
        f"{name}: {ring} must have two ring slots for each token of a group, so an even number, got {ring_slots}",
    )
    length = ring_slots // 2
    require(max_query_tokens >= 1, f"{name}: rows.max_query_tokens must be at least 1, got {max_query_tokens}")
    require(
        2 * max_query_tokens - 2 < length,
        f"{name}: rows.max_query_tokens must be at most {(length + 1) // 2} for groups of {length} tokens "
        f"(2 * max_query_tokens - 2 < {length}), got {max_query_tokens}",
    )
