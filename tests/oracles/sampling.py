"""The logits from which a token is chosen, in float64, from the definitions of `SamplingParams`."""

import numpy as np


def adjusted(logits, params, prompt, generated, ends=()):
    """The logits [vocab] after biases, `min_tokens` and penalties."""
    logits = np.array(logits, np.float64)
    for token, bias in params.logit_bias:
        logits[token] += bias
    if len(generated) < params.min_tokens:
        logits[[*ends, *params.stop_token_ids]] = -np.inf
    for token in {*prompt, *generated}:
        logits[token] *= 1 / params.repetition_penalty if logits[token] > 0 else params.repetition_penalty
    for token in set(generated):
        logits[token] -= params.frequency_penalty * list(generated).count(token)
        logits[token] -= params.presence_penalty
    return logits


def distribution(logits, params):
    """The probabilities [vocab] of a token that is drawn from changed logits."""
    if params.temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    p = np.exp((logits - logits.max()) / params.temperature)
    p[p < params.min_p * p.max()] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")[: params.top_k or len(p)]
    kept, mass = np.zeros(len(p)), 0.0
    for token in order:
        if mass >= params.top_p * p[order].sum():
            break
        kept[token], mass = p[token], mass + p[token]
    return kept / kept.sum()
