"""product_chain's one launch, run in NumPy by its schedule: the blocks of each CTA, and the indices of its results.

It takes from the kernel `schedule` and the order in which weights are multiplied. All values are float64 and are not
rounded between steps.
"""

import jax.numpy as jnp
import numpy as np
from oracles.layers import silu
from oracles.ops import gated_rms_norm

from pallas_kernels.product_chain import GatedNorm
from pallas_kernels.product_chain.schedule import ONE_TOKEN, WIDTH, schedule
from pallas_kernels.product_chain.step import weights_of
from pallas_kernels.product_chain.steps.experts import DownPhase, UpPhase


def float64(x):
    return np.asarray(x, np.float64)


def run(x, steps, residual, parts, ctas):
    """Returns the last step's results, [results] or [splits, results], and the residual stream."""
    plan = schedule(steps, parts, 2, ONE_TOKEN)
    weights = [float64(weight) for weight in weights_of(steps)]
    value = float64(x).reshape(-1, x.shape[-1])
    total = None if residual is None else float64(residual)[0]
    if isinstance(steps[0], GatedNorm):
        value = gated(value, steps[0], plan.phases[0].splits)
    for phase, own in zip(plan.phases, weights, strict=True):
        is_up, is_down = isinstance(phase, UpPhase), isinstance(phase, DownPhase)
        if phase.is_normed:
            value, total = normed(value, total, steps[phase.source])
        if is_up:
            chosen, factors = choice(value[0], phase.experts)
        elif not is_down:
            inputs = value.reshape(-1)  # also of the experts' first product
        if is_down:
            valid = phase.experts.valid is None or bool(phase.experts.valid[0])
            inputs = value.reshape(-1, phase.inputs) * factors[:, None] * valid
        value = np.full((phase.splits, phase.outputs), np.nan)
        for cta in range(ctas):
            split, first, step, count = (int(n) for n in phase.work(jnp.int32(cta), ctas))
            for block in range(first, first + step * count, step):
                terms = []
                for term in range(phase.terms):
                    expert, row, k_tile = phase.weights_of_block(split, jnp.int32(block), term)
                    matrix = own if expert is None else own[chosen[int(expert)]]
                    columns = slice(int(k_tile) * WIDTH, (int(k_tile) + phase.k_tiles) * WIDTH)
                    vector = inputs[int(expert)] if is_down else inputs[columns]
                    rows = matrix[int(row) : int(row) + phase.rows, columns] @ vector
                    terms.append(np.pad(rows, (0, phase.rows - len(rows))))
                place = slice(block * phase.rows, (block + 1) * phase.rows)
                assert np.isnan(value[split, place]).all(), "a result is computed twice"
                is_gated = phase.terms == 2 and not is_down
                value[split, place] = silu(terms[0]) * terms[1] if is_gated else sum(terms)
    if plan.ends_with_norm:
        value, total = normed(value, total, steps[-1])
    return value, total


def gated(x, step, splits):
    """Runs a gated norm like CTAs do, each of which has a split of the inputs."""
    pairs = zip(np.split(x, splits, axis=1), np.split(float64(step.gate), splits, axis=1), strict=True)
    return np.concatenate([gated_rms_norm(*pair, step.weight, step.epsilon, step.activation) for pair in pairs], axis=1)


def normed(addend, total, norm):
    total = total + norm.scale * addend.sum(axis=0)
    scale = 1 / np.sqrt((total**2).mean() + norm.epsilon)
    return total * scale * (norm.offset + float64(norm.weight)), total


def choice(logits, step):
    """Returns a token's experts, shared ones first, and their weights."""
    scores = np.exp(logits[: step.routed] - logits[: step.routed].max())
    best = np.argsort(-scores, kind="stable")[: step.top_k]
    weights = scores[best] / (scores[best] if step.renormalise else scores).sum()
    gate = 1 / (1 + np.exp(-logits[step.routed])) if step.shared_gate else 1.0
    chosen = [*(step.routed + number for number in range(step.shared)), *best]
    return chosen, np.array([*[gate] * step.shared, *weights])
