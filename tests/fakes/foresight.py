"""A drafter that knows what comes, and drafts as many tokens as a test wants, of which as many are right."""

import itertools

from mamba_align_jax.engine.drafting.protocols import Drafter


class Foresight(Drafter):
    """Drafts right tokens first, and then wrong ones: each is the right one plus one.

    Args:
        following: A function of a token list and a count: that many tokens that will follow, or fewer if there are no
            more.
        plan: A function of a token list: how many drafts it gets, and how many of them are right.
        vocab_size: The number of tokens; wrong drafts stay below it.

    Attributes:
        asked: The `max_drafts` of all calls, in order.
    """

    def __init__(self, following, plan, vocab_size):
        self.following, self.plan, self.vocab_size = following, plan, vocab_size
        self.known, self.asked = {}, []

    def draft(self, request, tokens, max_drafts):
        before = self.known.get(request, [])
        assert tokens[: len(before)] == before, f"request {request!r}: its tokens must extend those of the last call"
        self.known[request] = list(tokens)
        self.asked.append(max_drafts)
        return self.drafts_after(list(tokens), max_drafts)

    def drafts_after(self, tokens, max_drafts):
        """What `draft` returns, for no request in particular."""
        count, right = self.plan(tokens)
        coming = self.following(tokens, min(count, max_drafts))
        return [token if n < right else (token + 1) % self.vocab_size for n, token in enumerate(coming)]

    def forget(self, request):
        self.known.pop(request, None)


def in_turn(pairs):
    """A plan that goes through `pairs` of (drafts, right drafts), over and over."""
    turns = itertools.cycle(pairs)
    return lambda tokens: next(turns)


def one_by_one(next_token):
    """`following` for a model that is a function of all tokens so far."""

    def following(tokens, count):
        tokens, known = list(tokens), len(tokens)
        for _ in range(count):
            tokens.append(next_token(tokens))
        return tokens[known:]

    return following


def found_in(sequences):
    """`following` for a model whose sequences of tokens are known. It finds nothing after tokens that begin none."""

    def following(tokens, count):
        sequence = next((known for known in sequences if known[: len(tokens)] == tokens), tokens)
        return sequence[len(tokens) : len(tokens) + count]

    return following
