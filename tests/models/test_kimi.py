"""Random models of Kimi Linear and Ling 3 with their published names agree with the equations in float64."""

import itertools
import json
import re

import jax
import numpy as np
import pytest
from fakes.driver import ATOL, DATA, Driver
from fakes.kimi_weights import KIMI, KINDS, LING, ORACLE, write, write_random
from flax import nnx
from oracles.models import kimi
from safetensors.numpy import load_file

from mamba_align_jax.models import bailing_hybrid, kimi_linear, load_model

pytestmark = pytest.mark.usefixtures("for_a_cpu_alone")

CHECKPOINT = DATA / "kimi_linear"


@pytest.fixture(scope="module", params=[KIMI, LING], ids=["kimi_linear", "bailing_hybrid"])
def other(request, tmp_path_factory):
    """A configuration, its tensors by transformers' names, and the folder with the published names."""
    config, path = request.param, tmp_path_factory.mktemp(request.param["model_type"])
    return config, write_random(path, config), path


def test_logits_of_every_kind_of_row_match_the_oracle(other, rng):
    """One program runs a sequence as verify rows with wrong drafts and another in chunks, which another slot resumes."""
    config, tensors, path = other
    kind = config["model_type"]
    tokens = rng.integers(0, 96, 75).astype(np.int32)
    wanted = kimi(config | ORACLE[kind], KINDS[kind], tensors, tokens)
    driver, at, ends = Driver(load_model(path), one_program=True), 0, [0, 31, 33, 64, 71]
    for (begin, end), accepted in zip(itertools.pairwise(ends), [3, 1, 2, 3], strict=True):
        drafts = [*tokens[at : at + accepted], *(tokens[at + accepted : at + 3] + 1) % 96]
        out = driver.step(decode={0: drafts}, prefill={1: tokens[begin:end]}, accepted={0: accepted})
        np.testing.assert_allclose(out[0][:accepted], wanted[at : at + accepted], atol=ATOL, rtol=0)
        np.testing.assert_allclose(out[1], wanted[begin:end], atol=ATOL, rtol=0)
        at += accepted
    driver.add(2, computed=64, like=1)
    out = driver.step(decode={1: tokens[71:72]}, prefill={2: tokens[64:]})
    np.testing.assert_allclose(out[1], wanted[71:72], atol=ATOL, rtol=0)
    np.testing.assert_allclose(out[2], wanted[64:], atol=ATOL, rtol=0)


@pytest.mark.gpu
def test_compiled_kernels_match_the_oracle(other, rng):
    with jax.default_matmul_precision("highest"):
        test_logits_of_every_kind_of_row_match_the_oracle(other, rng)


def test_published_and_saved_names_load_the_same_model(other, tmp_path):
    config, tensors, path = other
    a, b = (jax.tree.leaves(nnx.state(load_model(p))) for p in (path, write(tmp_path / "saved", config, tensors)))
    assert len(a) == len(b)
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_fields_of_configurations():
    kimi, ling = kimi_linear.Config.from_dict(KIMI), bailing_hybrid.Config.from_dict(LING)
    assert list(kimi.layer_types) == KINDS["kimi_linear"]
    assert kimi.mlp_layer_types == ("dense", "sparse")
    assert (kimi.linear_num_heads, kimi.linear_head_dim, kimi.linear_conv_kernel_dim) == (3, 8, 3)
    assert (kimi.rope_theta, kimi.kda_lower_bound, kimi.max_position_embeddings, kimi.eos_token_id) == (
        None,
        None,
        512,
        (3, 4),
    )
    assert list(ling.layer_types) == KINDS["bailing_hybrid"]
    assert (ling.linear_num_heads, ling.linear_head_dim, ling.kda_lower_bound, ling.rope_theta) == (2, 10, -3.0, 500.0)
    assert (ling.num_expert_group, ling.num_experts_per_token, ling.num_shared_experts) == (4, 3, 1)
    assert bailing_hybrid.Config.from_dict(LING | {"kda_safe_gate": False}).kda_lower_bound is None
    bare = {
        name: value for name, value in LING.items() if name not in ("n_group", "topk_group", "routed_scaling_factor")
    }
    other = bailing_hybrid.Config.from_dict(bare | {"num_experts": 16})
    assert (other.num_expert_group, other.topk_group, other.routed_scaling_factor) == (8, 4, 2.5)
    # transformers saves these names.
    saved = json.loads((CHECKPOINT / "config.json").read_text())
    again = kimi_linear.Config.from_dict(saved)
    assert (again.layer_types[4], again.mlp_layer_types[:2]) == ("full_attention", ("dense", "sparse"))
    assert (again.linear_num_heads, again.linear_head_dim, again.num_experts_per_token) == (4, 16, 3)
    defaults = {name: value for name, value in saved.items() if not name.endswith("layer_types")}
    assert kimi_linear.Config.from_dict(defaults) == again
    assert kimi_linear.Config.from_dict(KIMI | {"num_experts": None}).mlp_layer_types == ("dense",) * 2
    rotated = bailing_hybrid.Config.from_dict(LING | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}})
    assert rotated.rope_theta == 7.0


def bounded(bound, **options):
    return {"linear_attn_config": KIMI["linear_attn_config"] | {"gate_lower_bound": bound} | options}


def test_the_bound_of_decays_is_read():
    assert kimi_linear.Config.from_dict(KIMI | bounded(-5.0)).kda_lower_bound == -5.0
    assert kimi_linear.Config.from_dict(KIMI | {"kda_lower_bound": -4.0}).kda_lower_bound == -4.0
    one_group = {"num_expert_group": 1, "topk_group": 1, "use_grouped_topk": False}
    assert kimi_linear.Config.from_dict(KIMI | bounded(None) | one_group).kda_lower_bound is None
    # Null means the same as nothing.
    assert bailing_hybrid.Config.from_dict(LING | {"kda_safe_gate": None}).kda_lower_bound == -3.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (KIMI | {"mla_use_nope": False}, "mla_use_nope must be one of (True,), got False"),
        (KIMI | {"moe_router_activation_func": "softmax"}, "moe_router_activation_func must be one of ('sigmoid',)"),
        (KIMI | {"num_expert_group": 4}, "num_experts must be a multiple of num_expert_group = 4, got 6"),
        (KIMI | {"num_expert_group": 6}, "num_expert_group must cut 6 experts into groups of two or more, got 6"),
        (
            KIMI | {"num_expert_group": 2, "use_grouped_topk": False},
            "use_grouped_topk must be one of (True,), got False",
        ),
        (
            KIMI | {"num_expert_group": 3, "topk_group": 1, "num_experts_per_token": 3},
            "num_experts_per_token must be at most 2",
        ),
        (KIMI | bounded(0.5), "the lower bound of log decays must be below 0, got 0.5"),
        (KIMI | bounded("-5"), "gate_lower_bound must be a finite number, got"),
        (KIMI | {"mla_use_output_gate": True}, "mla_use_output_gate must be one of (False,), got True"),
        (KIMI | bounded(None, use_full_rank_gate=True), "use_full_rank_gate must be one of (False,), got True"),
        (LING | {"kda_lower_bound": 5.0}, "the lower bound of log decays must be below 0, got 5.0"),
        (LING | {"kda_safe_gate": "false"}, "kda_safe_gate must be true or false, got"),
        (KIMI | {"num_experts_per_token": None}, "config.json must have 'num_experts_per_token'"),
        (
            KIMI | {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": []}},
            "layer_types must name num_hidden_layers = 2 layers",
        ),
        (KIMI | {"linear_attn_config": {}}, "config.json must have 'linear_num_heads'"),
        (KIMI | {"mlp_layer_types": ["dense"]}, "mlp_layer_types must name 2 layers"),
        (LING | {"rope_scaling": {"type": "yarn"}}, "type must be one of ('default', 'mrope'), got 'yarn'"),
        (LING | {"kv_lora_rank": None}, "config.json must have 'kv_lora_rank'"),
    ],
)
def test_unsupported_configuration_is_refused(config, message):
    architecture = kimi_linear if config["model_type"] == "kimi_linear" else bailing_hybrid
    with pytest.raises(ValueError, match=re.escape(message)):
        architecture.Config.from_dict(config)


def test_tensor_that_does_not_fit_is_refused(other, tmp_path):
    config, _, path = other
    tensors = load_file(path / "model.safetensors")
    expert = next(name for name in tensors if ".experts.3." in name)
    layer = expert.split(".")[2]
    with pytest.raises(ValueError, match=re.escape(f"tensor {expert!r} is missing")):
        load_model(write(tmp_path, config, {name: value for name, value in tensors.items() if name != expert}))
    with pytest.raises(ValueError, match=rf"tensors '.*' to '.*\.{layer}\..*' must make an array of shape"):
        load_model(write(tmp_path, config, tensors | {expert: tensors[expert][:-1]}))
    with pytest.raises(ValueError, match=r"tensor 'model.layers.9.x' has no place in"):
        load_model(write(tmp_path, config, tensors | {"model.layers.9.x": np.ones(1, np.float32)}))
