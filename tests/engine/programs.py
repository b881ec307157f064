"""Counts the conditionals of a traced step."""

import jax


def decisions(traced):
    """The number of conditionals, apart from choices by platform, which are made when the program is compiled."""

    def count(jaxpr):
        platforms = {id(eqn.outvars[0]) for eqn in jaxpr.eqns if eqn.primitive.name == "platform_index"}
        total = 0
        for eqn in jaxpr.eqns:
            kind = eqn.primitive.name
            if kind == "pallas_call":
                continue  # the host waits for no conditional inside a kernel
            total += kind == "cond" and id(eqn.invars[0]) not in platforms
            inner = (leaf for leaf in jax.tree.leaves(list(eqn.params.values())) if hasattr(leaf, "eqns"))
            total += sum(count(getattr(each, "jaxpr", each)) for each in inner)
        return total

    return count(traced.jaxpr.jaxpr)
