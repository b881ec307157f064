"""How the fields of config.json must fit together, whatever the architecture: tables of their names."""

from typing import Any

from mamba_align_jax.models.fields import wrong

# Pairs of fields: the second is a multiple of the first.
_MULTIPLES = (
    ("num_key_value_heads", "num_attention_heads"),
    ("linear_num_key_heads", "linear_num_value_heads"),
    ("mamba_n_groups", "mamba_n_heads"),
    ("n_groups", "mamba_num_heads"),
    ("n_groups", "num_heads"),
    ("n_group", "n_routed_experts"),
    ("num_expert_group", "num_experts"),
)
# Pairs of fields: how many are chosen, and from how many.
_CHOICES = (
    ("num_experts_per_tok", "num_experts"),
    ("num_experts_per_tok", "num_local_experts"),
    ("num_experts_per_tok", "n_routed_experts"),
    ("num_experts_per_token", "num_experts"),
    ("topk_group", "n_group"),
    ("topk_group", "num_expert_group"),
)
# Triples of fields: the number of experts, that of their groups, and how many experts a token has, of `topk_group` groups.
_GROUPS = (
    ("n_routed_experts", "n_group", "num_experts_per_tok"),
    ("num_experts", "num_expert_group", "num_experts_per_token"),
)
# Pairs of fields: a size, and the number of what has it.
_SIZES = tuple(
    (size, number)
    for size in ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    for number in ("num_experts", "n_routed_experts")
)


def check_together(config: Any) -> None:
    """Checks how an architecture's fields fit together. Rules about fields that it lacks are left out.

    Raises:
        FieldError: A field is no multiple of another one; more is chosen than there is, or nothing; a group has a
            single expert, or `topk_group` groups have fewer experts than a token; or what there is has no size. It is
            named.
    """

    def value(name: str) -> Any:
        return getattr(config, name, None)

    for divisor, name in _MULTIPLES:
        by = value(divisor)
        if by and value(name) is not None and value(name) % by:
            raise wrong(name, f"a multiple of {divisor} = {by}", value(name))
    for name, total in _CHOICES:
        number, chosen = value(total), value(name)
        if number and chosen is not None and not 1 <= chosen <= number:
            raise wrong(name, f"from 1 to {total} = {number}", chosen)
    for experts, groups, chosen in _GROUPS:
        number, count = value(experts), value(groups)
        if not number or count is None or count == 1:
            continue
        size = number // count
        if size < 2:
            raise wrong(groups, f"cut {number} experts into groups of two or more", count, must="must")
        most = size * config.topk_group
        if value(chosen) > most:
            raise wrong(chosen, f"at most {most}, those of topk_group groups", value(chosen))
    for name, number in _SIZES:
        if value(number) and value(name) == 0:
            raise wrong(name, f"at least 1 for {number} = {value(number)}", 0)
