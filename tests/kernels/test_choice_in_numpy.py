"""How product_chain's launch chooses experts, run in NumPy."""

import numpy as np
import pytest
from kernels.chain_in_numpy import choice
from kernels.threads_in_numpy import Ref, Threads, fake, install

from pallas_kernels.product_chain import Experts
from pallas_kernels.product_chain.steps import experts as of_experts

LANES = 32


@pytest.fixture
def in_numpy(monkeypatch):
    """Lets the choice run in NumPy."""
    threads = Threads()
    install(monkeypatch, threads, fake(threads), [of_experts])


def mixture(routed, top_k, shared=0, *, shared_gate=False, renormalise=True):
    shape = lambda *sizes: np.zeros(sizes, np.float32)
    experts = shape(routed + shared_gate, 256), shape(routed + shared, 512, 256), shape(routed + shared, 256, 256)
    options = dict(top_k=top_k, shared=shared, shared_gate=shared_gate, renormalise=renormalise)
    return Experts(*experts, **options)


def chosen_of(logits, experts):
    """Returns the experts and their weights as the kernel writes them, in memory that held something else."""
    padded = np.concatenate([logits, np.full(-len(logits) % 128, -0.0, np.float32)])
    chosen, factors = np.full(LANES, -7, np.int32), np.full(LANES, np.nan, np.float32)
    of_experts.choose(Ref(padded), Ref(chosen), Ref(factors), experts)
    assert (chosen[experts.chosen :] == -7).all()
    assert np.isnan(factors[experts.chosen :]).all()
    return chosen[: experts.chosen], factors[: experts.chosen]


@pytest.mark.usefixtures("in_numpy")
@pytest.mark.parametrize(
    "experts",
    [
        mixture(256, 8, 1, shared_gate=True),
        mixture(512, 10, 1, shared_gate=True, renormalise=False),
        mixture(4, 4, 2),
        mixture(40, 3),
        mixture(33, 1, 3, renormalise=False),
    ],
    ids=lambda experts: f"{experts.top_k} of {experts.routed} and {experts.shared}",
)
def test_the_best_experts_are_chosen_and_weighted(rng, experts):
    for scale in (1.0, 30.0):
        logits = scale * rng.standard_normal(experts.router.shape[0], np.float32)
        chosen, factors = chosen_of(logits, experts)
        wanted, wanted_factors = choice(logits.astype(np.float64), experts)
        np.testing.assert_array_equal(chosen, wanted)
        np.testing.assert_allclose(factors, wanted_factors, rtol=1e-5)


@pytest.mark.usefixtures("in_numpy")
def test_of_equal_logits_the_lower_index_is_chosen_and_zeros_are_equal():
    logits = np.full(64, -0.0, np.float32)
    logits[[50, 9]] = 1.0
    chosen, factors = chosen_of(logits, mixture(64, 4))
    np.testing.assert_array_equal(chosen, [9, 50, 0, 1])
    np.testing.assert_allclose(factors.sum(), 1.0, rtol=1e-6)


@pytest.mark.usefixtures("in_numpy")
def test_experts_exist_whatever_the_logits_are():
    for value in (np.nan, np.inf, -np.inf):
        logits = np.full(40, value, np.float32)
        with np.errstate(invalid="ignore"):
            chosen, _ = chosen_of(logits, mixture(40, 5))
        assert len(set(chosen.tolist())) == 5
        assert chosen.min() >= 0
        assert chosen.max() < 40
