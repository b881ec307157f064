"""Every mixer follows the protocol, and every model declares its mixers."""

import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from benchmarks.precision import MODELS, configuration
from mamba_align_jax import layers
from mamba_align_jax.align.config import ConvState, RecurrentState
from mamba_align_jax.layers.attention import Attention
from mamba_align_jax.layers.mixer import ATTENTION, Mixer, SplitMixer
from mamba_align_jax.models import ARCHITECTURES
from mamba_align_jax.models.mamba import Backbone
from mamba_align_jax.models.tensor_parallel import shard_model

pytestmark = pytest.mark.usefixtures("for_a_cpu_alone")

MODULES = [
    importlib.import_module(found.name) for found in pkgutil.iter_modules(layers.__path__, f"{layers.__name__}.")
]
CLASSES = {each for module in MODULES for each in vars(module).values() if isinstance(each, type)}
MIXERS = sorted((each for each in CLASSES if issubclass(each, nnx.Module) and hasattr(each, "kind")), key=str)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """A model of each architecture: shapes, without weights."""
    architecture = ARCHITECTURES[request.param]
    return nnx.eval_shape(lambda: architecture.Model(configuration(request.param), nnx.Rngs(0)))


@pytest.mark.parametrize("mixer", MIXERS)
def test_mixer_follows_the_protocol(mixer):
    parameters = lambda function: [(p.name, p.kind) for p in inspect.signature(function).parameters.values()]
    assert isinstance(mixer.kind, str)
    assert parameters(mixer.__call__) == parameters(Mixer.__call__)
    assert parameters(mixer.states) == parameters(Mixer.states)
    assert callable(mixer.split)
    assert isinstance(mixer.__new__(mixer), SplitMixer)


def test_model_declares_exactly_its_mixers(model):
    declared = [mixer for layer in model.layers for mixer in layer.mixers]
    found = [module for layer in model.layers for _, module in nnx.iter_modules(layer) if isinstance(module, Mixer)]
    assert {id(mixer) for mixer in declared} == {id(module) for module in found}
    assert len(declared) == len(found)
    assert sum(map(len, model.mixers().values())) == len(found)


def test_mixers_of_one_kind_have_states_of_one_shape(model):
    for kind, mixers in model.mixers().items():
        states = {mixer.states("bfloat16", "float32") for mixer in mixers}
        assert len(states) == 1
        (of_kind,) = states
        assert (of_kind == ()) == (kind == ATTENTION)
        assert all(isinstance(state, ConvState | RecurrentState) for state in of_kind)


def test_every_mixer_is_in_a_model():
    used = set()
    for name in MODELS:
        found = nnx.eval_shape(lambda name=name: ARCHITECTURES[name].Model(configuration(name), nnx.Rngs(0)))
        used |= {type(mixer) for mixers in found.mixers().values() for mixer in mixers}
    assert used == set(MIXERS)


def test_every_mixer_that_keeps_states_keeps_boundaries_inside_chunks():
    assert all(mixer.kind == ATTENTION or mixer.keeps_interior for mixer in MIXERS)


class Foreign(nnx.Module):
    kind = "foreign"

    def states(self, conv_dtype, state_dtype):
        return (RecurrentState((1, 1), state_dtype),)

    def __call__(self, x, at, *pools):
        return x, *pools


def test_a_mixer_that_cannot_be_split_is_named_when_a_model_is_split():
    config = configuration("mamba")
    model = Backbone(config, [Foreign()], nnx.Rngs(0))
    model.layers[0].__class__ = type(
        "Layer", (type(model.layers[0]),), {"mixers": property(lambda self: (self.mixer,))}
    )
    with pytest.raises(
        ValueError, match=r"must have a method split \(layers\.mixer\.SplitMixer\), got Foreign of kind 'foreign'"
    ):
        shard_model(model, jax.make_mesh((1,), ("tensor",)))


def test_attention_without_pages_is_refused():
    from mamba_align_jax import AlignConfig, AlignState, BlockTables, GroupSpec, LayerStep, StepBatch, begin_step

    align = AlignConfig((GroupSpec("none", 1, (RecurrentState((1, 1)),)),), 4, max_num_seqs=1, max_model_len=8)
    batch = StepBatch.from_host(align, 1, [0], [0, 2], [-1])
    _, indices = begin_step(align, AlignState.create(align), batch, BlockTables.create(align))
    at = LayerStep.create(batch, indices, num_decode_rows=0, num_tokens=2)
    layer = Attention(8, 2, 1, 4, "float32", nnx.Rngs(0))
    pages = jnp.zeros((1, 2, 4, 1, 4))
    with pytest.raises(ValueError, match="pages must be given to a step with attention layers, got None"):
        layer(jnp.zeros((2, 8)), at, pages, pages)
