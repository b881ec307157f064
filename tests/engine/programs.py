"""Looks into traced steps: the conditionals that they make, and the shapes of the arrays that they compute."""

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


def shapes(traced):
    """The shapes of all arrays that a traced step computes, those inside kernels left out."""

    def find(jaxpr):
        found = set()
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "pallas_call":
                continue
            found |= {var.aval.shape for var in eqn.outvars}
            inner = (leaf for leaf in jax.tree.leaves(list(eqn.params.values())) if hasattr(leaf, "eqns"))
            found = found.union(*(find(getattr(each, "jaxpr", each)) for each in inner))
        return found

    return find(traced.jaxpr.jaxpr)
