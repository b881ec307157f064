"""What a compiled step would decide on the device."""

import jax


def decisions(traced):
    """Conditionals of a program, but for the ops' choices by platform, which are made when it is compiled."""

    def count(jaxpr):
        platforms = {id(eqn.outvars[0]) for eqn in jaxpr.eqns if eqn.primitive.name == "platform_index"}
        total = 0
        for eqn in jaxpr.eqns:
            kind = eqn.primitive.name
            if kind == "pallas_call":
                continue  # inside a kernel nobody waits
            total += kind == "cond" and id(eqn.invars[0]) not in platforms
            inner = (leaf for leaf in jax.tree.leaves(list(eqn.params.values())) if hasattr(leaf, "eqns"))
            total += sum(count(getattr(each, "jaxpr", each)) for each in inner)
        return total

    return count(traced.jaxpr.jaxpr)
