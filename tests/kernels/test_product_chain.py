"""product_chain: chains of one and of several tokens against float64, step by step, and what one launch refuses."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import chain_in_numpy
from kernels.chains import (
    CASES,
    ODD,
    OF_TOKENS,
    SMALL,
    WITH_EXPERTS,
    WITH_GATED_NORM,
    changed,
    draw,
    drawn_clearly,
    oracle,
    whole,
)
from kernels.common import IMPLEMENTATIONS, MOSAIC_GPU, assert_close, run_by, skip_if_unavailable

from benchmarks.workloads.product_chain import Case, Mixture
from pallas_kernels import Run, UnsupportedError, product_chain
from pallas_kernels.product_chain import GatedNorm, Norm, Product, api, schedule

_LARGE = "to a delta net", "from a delta net", "to attention", "to the last norm"
LARGE_OF_TOKENS = [case for case in CASES if case.name in _LARGE]
# Its weights take too long on a CPU.
BETWEEN_NORMS = Case("splits of a normed result between norms", ("norm", 4096, "norm"), 4096, dtype="float16")
BY_ONE_LAUNCH = [*CASES, *ODD, *WITH_EXPERTS, *WITH_GATED_NORM, BETWEEN_NORMS]
# A model's experts have weights of 1 GB each.
BY_ONE_LAUNCH = [
    pytest.param(case, id=case.name, marks=[pytest.mark.large_pool] if "experts" in case.name and case in CASES else [])
    for case in BY_ONE_LAUNCH
]


def check(rng, case, tokens=1, run=Run()):
    """Compares a case with the oracle. What a step rounds differently travels on, so the bound grows with the steps."""
    (x, steps, residual), (wanted, wanted_total) = drawn_clearly(rng, case, tokens)
    out, total = product_chain(x, steps, residual, parts=case.parts, run=run)
    found = whole(out)
    assert found.shape == wanted.shape
    if case.parts:
        assert [(part.shape, part.dtype) for part in out] == [((tokens, n), case.dtype) for n in case.parts]
    roundings = 2 * len(steps)
    terms = max(weight.shape[-1] for weight in jax.tree.leaves(steps) if weight.ndim > 1)
    assert_close(found / roundings, wanted / roundings, case.dtype, terms, "results")
    if residual is None:
        assert total is None
    else:
        assert (total.shape, total.dtype) == (residual.shape, residual.dtype)
        assert_close(np.asarray(total, np.float64) / roundings, wanted_total / roundings, case.dtype, terms, "residual")


# With many tokens, some token's choice of experts is not clear.
SEPARATE = [(case, tokens) for case in [*SMALL, *ODD[:2], *ODD[3:]] for tokens in (1, 3, 70)]
SEPARATE += [(case, tokens) for case in [*WITH_EXPERTS[:2], *WITH_GATED_NORM] for tokens in (1, 3)]
# What one launch does not run: heads of any size, and nothing but a gated norm.
SEPARATE += [
    (Case("heads of 80 channels", (("silu", 80), 256, "norm"), 640), 3),
    (Case("alone", (("silu", 4),), 64), 3),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[::2])
@pytest.mark.parametrize(("case", "tokens"), [pytest.param(*each, id=f"{each[0].name}-{each[1]}") for each in SEPARATE])
def test_separate_launches_match_the_oracle(rng, case, tokens, implementation):
    check(rng, case, tokens, run=run_by(implementation))


def test_separate_launches_can_be_interpreted_and_have_no_configuration(rng):
    check(rng, SMALL[0], 3, run=run_by("interpret"))
    with pytest.raises(ValueError, match=r"product_chain: run\.config must be None, got 3"):
        product_chain(*draw(rng, SMALL[0]), run=Run(config=3))


@pytest.mark.parametrize("implementation", [MOSAIC_GPU])
@pytest.mark.parametrize("case", BY_ONE_LAUNCH)
def test_one_launch_matches_the_oracle(rng, case, implementation):
    check(rng, case, run=run_by(implementation))


@pytest.mark.parametrize("implementation", [MOSAIC_GPU])
@pytest.mark.parametrize(
    ("case", "tokens"),
    [
        pytest.param(case, tokens, id=f"{case.name}-{tokens}")
        for cases, counts in ((OF_TOKENS, (2, 5, 8, 9, 16)), (LARGE_OF_TOKENS, (3, 16)))
        for case in cases
        for tokens in counts
    ],
)
def test_one_launch_of_several_tokens_matches_the_oracle(rng, case, tokens, implementation):
    check(rng, case, tokens, run=run_by(implementation))


@pytest.mark.parametrize("implementation", [MOSAIC_GPU])
@pytest.mark.parametrize("case", [OF_TOKENS[1], OF_TOKENS[5], OF_TOKENS[-1]], ids=lambda case: case.name)
def test_tokens_of_one_launch_do_not_change_each_others_bits(rng, case, implementation):
    """Nor does their number."""
    skip_if_unavailable(implementation)
    x, steps, residual = draw(rng, case, 16)
    run = functools.partial(product_chain, parts=case.parts, run=run_by(implementation))
    wanted, wanted_total = run(x, steps, residual)
    for tokens in (2, 7, 8, 11):
        few = [changed(step, gate=step.gate[:tokens]) if isinstance(step, GatedNorm) else step for step in steps]
        found, total = run(x[:tokens], few, residual[:tokens])
        for part, whole_part in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(part, whole_part[:tokens])
        np.testing.assert_array_equal(total, wanted_total[:tokens])


@pytest.mark.parametrize("implementation", [MOSAIC_GPU])
def test_tokens_that_are_not_finite_do_not_reach_others(rng, implementation):
    """Zeros must not be waited for either: they are how memory says that a number is not there yet."""
    skip_if_unavailable(implementation)
    case = OF_TOKENS[1]
    x, steps, residual = draw(rng, case, 5)
    run = functools.partial(product_chain, parts=case.parts, run=run_by(implementation))
    wanted, _ = run(x, steps, residual)
    found, total = run(x.at[3].set(jnp.nan), steps, residual)
    for part, clean in zip(found, wanted, strict=True):
        assert np.isnan(np.asarray(part[3], np.float32)).all()
        np.testing.assert_array_equal(np.delete(part, 3, 0), np.delete(clean, 3, 0))
    assert np.isnan(np.asarray(total[3], np.float32)).all()
    _, total = run(jnp.zeros_like(x), steps, jnp.zeros_like(residual))
    np.testing.assert_array_equal(total, jnp.zeros_like(residual))


@pytest.mark.parametrize(("number", "tokens"), [(5, 1), (1, 6)])
@pytest.mark.parametrize("implementation", [MOSAIC_GPU])
def test_launches_that_follow_each_other_have_the_same_bits_as_alone(rng, number, tokens, implementation):
    """What programs send each other is fresh in every launch, and no launch leaves anything to the next one."""
    skip_if_unavailable(implementation)
    case = (ODD if tokens == 1 else OF_TOKENS)[number]
    arguments = [draw(rng, case, tokens) for _ in range(3)]
    one = functools.partial(product_chain, run=run_by(implementation))
    alone = [jax.jit(one)(*given) for given in arguments]

    @jax.jit
    def together(arguments):
        return [one(*given) for given in [*arguments, *arguments[::-1]]]

    for _ in range(20):
        found = together(arguments)
        for (out, total), (wanted, wanted_total) in zip(found, [*alone, *alone[::-1]], strict=True):
            np.testing.assert_array_equal(out, wanted)
            np.testing.assert_array_equal(total, wanted_total)


@pytest.mark.parametrize("implementation", [MOSAIC_GPU])
def test_zeros_and_values_that_are_not_finite_arrive(rng, implementation):
    """+0 is how memory says that a number is not there yet, so zeros must not be waited for. NaN must not be lost."""
    skip_if_unavailable(implementation)
    x, steps, residual = draw(rng, ODD[6])
    weight = steps[0].weight.at[:4].set(0.0).at[5].set(-0.0)
    steps = (Product(weight), steps[1])
    _, total = product_chain(x, steps, residual, run=run_by(implementation))
    np.testing.assert_array_equal(total[0, :4], residual[0, :4])
    steps = (Product(weight.at[7].set(jnp.nan)), steps[1])
    out, total = product_chain(x, steps, residual, run=run_by(implementation))
    assert np.flatnonzero(np.isnan(np.asarray(total, np.float32)[0])).tolist() == [7]
    assert np.isnan(np.asarray(out, np.float32)).all()


@pytest.mark.parametrize("implementation", ["xla", MOSAIC_GPU])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_a_gated_norm_takes_zeros_closed_gates_and_values_that_are_not_finite(rng, implementation, activation):
    skip_if_unavailable(implementation)
    case = Case("gated", ((activation, 128), 256, "norm"), 512)
    x, (gated, *others), residual = draw(rng, case)

    def total(x, gate):
        steps = [dataclasses.replace(gated, gate=gate), *others]
        return np.asarray(product_chain(x, steps, residual, run=run_by(implementation))[1], np.float32)

    np.testing.assert_array_equal(total(jnp.zeros_like(x), gated.gate), residual)
    np.testing.assert_array_equal(total(x, jnp.full_like(gated.gate, -1e4)), residual)
    assert np.isfinite(total(x, jnp.full_like(gated.gate, 1e4))).all()
    assert np.isnan(total(x.at[0, 300].set(jnp.nan), gated.gate)).all()
    assert np.isnan(total(x, gated.gate.at[0, 5].set(jnp.nan))).all()


@pytest.mark.parametrize("implementation", ["xla", MOSAIC_GPU])
@pytest.mark.parametrize("value", [1.0, np.nan])
def test_a_token_of_padding_gets_no_experts(rng, implementation, value):
    """Whatever the experts' weights hold."""
    skip_if_unavailable(implementation)
    x, (*first, experts, norm), residual = draw(
        rng, Case("padding", (256, "norm", Mixture(8, 2, 256, 256), "norm"), 512)
    )
    _, wanted = product_chain(x, first, residual, run=run_by(implementation))
    experts = dataclasses.replace(experts, valid=jnp.array([False]), down=jnp.full_like(experts.down, value))
    _, total = product_chain(x, [*first, experts, norm], residual, run=run_by(implementation))
    np.testing.assert_array_equal(total, wanted)


@pytest.mark.parametrize("ctas", [132, 16])
@pytest.mark.parametrize("case", [*SMALL, *ODD, *WITH_EXPERTS, *WITH_GATED_NORM], ids=lambda case: case.name)
def test_the_schedule_computes_a_chain(rng, case, ctas):
    """Also where no GPU can run the launch: every block is multiplied by what it is to be multiplied by."""
    if case.name == "many splits" and ctas == 16:
        pytest.skip("there are more splits than ctas")
    make = lambda shape, dtype, deviation: jnp.asarray(deviation * rng.standard_normal(shape, np.float32))
    x, steps, residual = case.arguments(make)
    found, total = chain_in_numpy.run(x, steps, residual, case.parts, ctas)
    wanted, wanted_total, _ = oracle(x, steps, residual, "float32")
    np.testing.assert_allclose(found.reshape(-1, wanted.size).sum(axis=0), wanted[0], rtol=0, atol=1e-4)
    if residual is not None:
        np.testing.assert_allclose(total, wanted_total[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("ctas", [132, 114, 78, 16])
@pytest.mark.parametrize("case", [*CASES, *ODD, *WITH_EXPERTS, *WITH_GATED_NORM], ids=lambda case: case.name)
def test_ctas_divide_the_work_without_gaps(case, ctas):
    """Every block of every split of every phase belongs to one CTA, and SMEM holds more blocks than are in flight."""
    _, steps, _ = case.arguments(lambda shape, dtype, _: jax.ShapeDtypeStruct(shape, dtype))
    plan = schedule.schedule(steps, case.parts, 2, schedule.ONE_TOKEN)
    assert 2 <= plan.depth <= plan.slots
    for phase in plan.phases:
        if phase.splits > ctas:
            continue
        found = []
        for cta in range(ctas):
            split, first, step, count = (int(n) for n in phase.work(jnp.int32(cta), ctas))
            found += [(split, first + step * n) for n in range(count)]
        assert sorted(found) == [(split, block) for split in range(phase.splits) for block in range(phase.blocks)]


def test_short_chains_are_separate_launches_unless_one_is_named(monkeypatch):
    """One launch of few steps costs more than it saves. A gated norm does not count."""
    by_one_launch = []
    monkeypatch.setattr(api, "unavailable", lambda *arguments: None)
    monkeypatch.setattr(api, "_run", lambda *given: by_one_launch.append(given[-1] is None) or (None, None, None))
    for case in [*CASES[:5], *ODD, *WITH_EXPERTS, *WITH_GATED_NORM]:
        shapes = lambda shape, dtype, _: jax.ShapeDtypeStruct(shape, dtype)
        x, steps, residual = dataclasses.replace(case, dtype="bfloat16").arguments(shapes)
        jax.eval_shape(functools.partial(product_chain, parts=case.parts), x, steps, residual)
        counted = [step for step in steps if not isinstance(step, GatedNorm)]
        assert by_one_launch.pop() == (len(counted) >= schedule.FEWEST_STEPS), case


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(tokens=17), "there must be 1 to 16 tokens, got 17"),
        (dict(tokens=2, steps=(256, "norm")), "the first and the last step must be products"),
        (dict(tokens=2, steps=(256, "norm", Mixture(8, 2, 256, 256), "norm", 256)), "experts must have one token"),
        (dict(tokens=2, dtype="float32"), r"all weights must be bfloat16 or all float16, got \['float32'\]"),
        (dict(tokens=2, steps=(260, "norm", 256)), "a product must have a multiple of 8 outputs, got 260"),
        (dict(tokens=2, inputs=500), "a product must have a multiple of 256 inputs, got 500"),
        (dict(tokens=2, steps=(384, "norm", 256)), "a norm must have a multiple of 256 channels, got 384"),
        (dict(tokens=2, steps=(256, ("gated", 256))), "the last product must not be gated"),
        (dict(tokens=2, steps=(256, "norm", 264), parts=(260, 4)), r"parts must be multiples of 8, got \[260, 4\]"),
        (dict(tokens=2, inputs=3328, steps=(256, 256)), "a product has too many inputs, 3328"),
        (dict(tokens=2, steps=(("silu", 16), 256, "norm", 256)), "must have 32, 64, 128 or 256 channels, got 16"),
        (dict(dtype="float32"), "all weights must be bfloat16 or all float16"),
        (dict(inputs=500), "a product must have a multiple of 256 inputs, got 500"),
        (dict(steps=(258, "norm")), "a product must have a multiple of 4 outputs, got 258"),
        (dict(steps=(260, "norm")), "a norm must have a multiple of 128 channels, got 260"),
        (dict(steps=(256, 768, 256)), "the last product must have a multiple of 1024 inputs, got 768"),
        (dict(steps=(256,)), "there must be a product and another step, got 1 steps"),
        (dict(steps=(256, ("gated", 256))), "the last product must not be gated"),
        (dict(steps=(256, "norm", 18), parts=(10, 8)), "a product must have a multiple of 4 outputs, got 18"),
        (dict(steps=(256, "norm", 20), parts=(10, 10)), "parts must be multiples of 4"),
        (dict(inputs=8192, steps=(256, 256)), "a product has too many inputs, 8192"),
        (dict(steps=(("silu", 128), 256)), "there must be a product and another step, got 1 steps"),
        (dict(steps=(("silu", 256), 256, "norm")), "a power of two channels from 2 to 64, got 256"),
        (dict(steps=(("silu", 96), 256, "norm"), inputs=1536), "a power of two channels from 4 to 128, got 96"),
    ],
)
def test_what_one_launch_cannot_run_is_refused(rng, changes, message):
    changes = dict(changes)
    tokens = changes.pop("tokens", 1)
    case = Case("refused", **(dict(steps=(256, "norm", 256), inputs=256) | changes))
    with pytest.raises(UnsupportedError, match=message):
        product_chain(*draw(rng, case, tokens), parts=case.parts, run=Run(implementation="mosaic_gpu"))


def test_one_launch_of_several_tokens_refuses_mixed_dtypes_and_too_few_sms(rng):
    x, steps, residual = draw(rng, OF_TOKENS[1], 2)
    reason = functools.partial(schedule.unsupported, parts=None)
    assert reason(x, steps, residual, ctas=132) is None
    mixed = "all arrays of several tokens must have one dtype, got ['bfloat16', 'float32']"
    norm = changed(steps[1], out_dtype="float32")
    for arguments in (
        (x.astype("float32"), steps, residual),
        (x, steps, residual.astype("float32")),
        (x, (steps[0], norm, *steps[2:]), residual),
    ):
        assert reason(*arguments, ctas=132) == mixed
    assert reason(x, steps, residual, ctas=114) == "norms of several tokens need 128 SMs, got 114"


def test_a_normed_result_that_shared_memory_does_not_hold_is_refused():
    case = Case("wide", ("norm", 57344, "norm"), 57344)
    arguments = case.arguments(lambda shape, dtype, _: jax.ShapeDtypeStruct(shape, dtype))
    reason = schedule.unsupported(*arguments, parts=None, ctas=132)
    assert reason == "a product has too many inputs, 57344"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, p, n, r: (x, (), r), "steps must not be empty"),
        (lambda x, p, n, r: (x, (p, n, n), r), "step 2: a norm must be the first step or follow a product"),
        (lambda x, p, n, r: (x, (p, n), None), "step 1: a norm needs a residual stream"),
        (lambda x, p, n, r: (x, (p, n), r[:, 1:]), r"step 1: residual must be \[1, 256\], got \[1, 255\]"),
        (lambda x, p, n, r: (x[:, 1:], (p, n), r), r"step 0: weight must be \[outputs, 255\], got \[256, 256\]"),
        (lambda x, p, n, r: (x[None], (p, n), r), "step 0: only a norm takes partial sums"),
        (lambda x, p, n, r: (x, (p, 3), r), r"step 1: must be one of \['Convolution', .*'Product'\], got int"),
        (lambda x, p, n, r: (x, (p, Norm(n.weight[1:], 1e-6)), r), r"step 1: weight must be \[256\], got \[255\]"),
        (
            lambda x, p, n, r: (x, (Product([[1.0] * 256]),)),
            r"step 0: weight must be Float\[outputs inputs\], got \[\[1.0",
        ),
        (lambda x, p, n, r: (x, (Product(p.weight[0]),)), r"step 0: weight must be Float\[outputs inputs\], got jax"),
        (lambda x, p, n, r: (x, (p, Norm(r, 1e-6)), r), r"step 1: weight must be Float\[channels\], got jax"),
        (lambda x, p, n, r: (x[:0].reshape(0, 1, 256), (n,), r), "x must have at least one partial sum, got none"),
    ],
)
def test_bad_steps_are_refused(rng, change, message):
    x, (product, norm), residual = draw(rng, Case("bad", (256, "norm"), 256))
    with pytest.raises(ValueError, match=message):
        product_chain(*change(x, product, norm, residual))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, g, p, n: (x, (p, g)), "step 1: a gated norm must be the first step"),
        (lambda x, g, p, n: (x, (g, g, p)), r"a product must follow a gated norm, got \['GatedNorm', 'GatedNorm'"),
        (lambda x, g, p, n: (x, (g, n)), r"a product must follow a gated norm, got \['GatedNorm', 'Norm'\]"),
        (lambda x, g, p, n: (x[None], (g, p)), r"step 0: only a norm takes partial sums, got x \[1, 1, 256\]"),
        (lambda x, g, p, n: (x, (changed(g, gate=x[:, 1:]), p)), r"step 0: gate must be \[1, 256\], got \[1, 255\]"),
        (lambda x, g, p, n: (x, (changed(g, weight=jnp.ones(96)), p)), r"must be \[a divisor of 256\], got \[96\]"),
        (
            lambda x, g, p, n: (x, (changed(g, activation="tanh"), p)),
            r"must be one of \['silu', 'sigmoid'\], got 'tanh'",
        ),
    ],
)
def test_bad_gated_norms_are_refused(rng, change, message):
    x, steps, residual = draw(rng, Case("bad", (("silu", 64), 256, "norm"), 256))
    with pytest.raises(ValueError, match=message):
        product_chain(*change(x, *steps), residual)


def test_parts_belong_to_a_last_product(rng):
    x, steps, residual = draw(rng, Case("bad", (256, "norm"), 256))
    with pytest.raises(ValueError, match="parts need a last product"):
        product_chain(x, steps, residual, parts=(256,))
    for wrong in ((100, 100), (256.0,), 256, "ab", (True, 255), (0, 256), ()):
        wanted = f"product_chain: parts must be positive integers whose sum is 256, got {wrong!r}"
        with pytest.raises(ValueError, match=re.escape(wanted)):
            product_chain(x, steps[:1], parts=wrong)
    wanted, _ = product_chain(x, steps[:1], parts=(128, 128))
    for parts in ([128, 128], (np.int64(128), 128)):
        for one, other in zip(product_chain(x, steps[:1], parts=parts)[0], wanted, strict=True):
            np.testing.assert_array_equal(one, other)


def test_no_tokens_give_empty_results(rng):
    for steps, shape in (
        ((("silu", 64), 256, ("gated", 256)), (0, 256)),
        ((("silu", 64),), (0, 256)),
        ((256,), (1, 0, 256)),
    ):
        x, steps, residual = draw(rng, Case("none", steps, 256), 0)
        assert product_chain(x, steps, residual)[0].shape == shape
        assert schedule.unsupported(x, steps, residual, None, ctas=132) is not None
