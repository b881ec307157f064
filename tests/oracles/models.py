"""Whole models in NumPy float64, on weights by their published names, and the references in tests/data.

A model is a function of its configuration, its tensors by name and the tokens of one sequence. It returns the logits
[tokens, vocab].
"""

import functools
import json
import math

import numpy as np
from oracles.layers import (
    attend,
    attention,
    delta_net,
    feed_forward,
    gated_mlp,
    kimi_delta_attention,
    mamba1,
    mamba2,
    mixture,
    multi_head_latent_attention,
    project,
    rms,
    rotate,
    sigmoid,
    silu,
    softmax,
    under,
)
from safetensors.numpy import load_file


def read(path):
    """The configuration and the float64 tensors of the model in the folder `path`."""
    tensors = load_file(path / "model.safetensors")
    return json.loads((path / "config.json").read_text()), {name: t.astype(np.float64) for name, t in tensors.items()}


def greedy(decode, prompt, length):
    """The prompt and the tokens that the logits of `decode` choose after it: `length` tokens in all."""
    tokens = [*prompt]
    while len(tokens) < length:
        tokens.append(decode(tokens)[-1].argmax())
    return np.array(tokens)


def causal_lm(config, tensors, tokens, layer, *, prefix="model", embedding="embed_tokens", norm="norm", epsilon=None):
    """Logits of the embedding, each `layer(number, weights, x)` in turn, the last norm and the head."""
    w = under(tensors, prefix)
    x = w[f"{embedding}.weight"][np.asarray(tokens)] * config.get("embedding_multiplier", 1.0)
    for number in range(len({name.split(".")[1] for name in w if name.startswith("layers.")})):
        x = layer(number, under(w, f"layers.{number}"), x)
    x = rms(x, epsilon or config["rms_norm_eps"]) * w[f"{norm}.weight"]
    return x @ tensors.get("lm_head.weight", w[f"{embedding}.weight"]).T


def falcon_mamba(config, tensors, tokens):
    def layer(_, w, x):
        normed = rms(x, config["layer_norm_epsilon"]) * w["norm.weight"]
        return x + mamba1(under(w, "mixer"), normed, norm_epsilon=config["mixer_rms_eps"])[0]

    names = dict(prefix="backbone", embedding="embeddings", norm="norm_f", epsilon=config["layer_norm_epsilon"])
    return causal_lm(config, tensors, tokens, layer, **names)


def nemotron_h(config, tensors, tokens, min_dt=0.0, trace=None):
    """Nemotron-H. Each Mamba layer appends its convolution's inputs and its states to the list `trace`, if there is one."""
    relu2 = lambda w, x: project(w, "down_proj", np.maximum(project(w, "up_proj", x), 0) ** 2)

    def moe(w, x):
        scores = 1 / (1 + np.exp(-project(w, "gate", x)))
        inner = project(w, "fc1_latent_proj", x) if "fc1_latent_proj.weight" in w else x
        expert = lambda e, x: relu2(under(w, f"experts.{e}"), x)
        by = scores + w["gate.e_score_correction_bias"]
        groups = by.reshape(len(by), config.get("n_group", 1), -1)
        best_two = np.sort(groups)[..., -2:].sum(-1)
        kept = best_two >= np.sort(best_two)[:, [-config.get("topk_group", 1)]]
        by = np.where(kept[..., None], groups, -np.inf).reshape(by.shape)
        out = mixture(
            inner,
            scores,
            config["num_experts_per_tok"],
            expert,
            chosen_by=by,
            normalise=config.get("norm_topk_prob", True),
        )
        out = out * config["routed_scaling_factor"]
        out = project(w, "fc2_latent_proj", out) if "fc1_latent_proj.weight" in w else out
        return out + relu2(under(w, "shared_experts"), x)

    def mamba(w, x):
        out, *states = mamba2(w, x, state_dim=config["ssm_state_size"], epsilon=epsilon, min_dt=min_dt)
        if trace is not None:
            trace.append(states)
        return out

    epsilon = config["layer_norm_epsilon"]
    mixers = {
        "linear_attention": mamba,
        "full_attention": lambda w, x: attention(w, x, config["num_attention_heads"], config["num_key_value_heads"]),
        "mlp": relu2,
        "moe": moe,
    }

    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    kinds = config.get("layers_block_type") or [names[letter] for letter in config["hybrid_override_pattern"]]

    def layer(number, w, x):
        return x + mixers[kinds[number]](under(w, "mixer"), rms(x, epsilon) * w["norm.weight"])

    names = dict(prefix="backbone", embedding="embeddings", norm="norm_f", epsilon=epsilon)
    return causal_lm(config, tensors, tokens, layer, **names)


def without_clamp(path, arrays):
    """The reference `arrays` of Nemotron-H with what a model without clamped step sizes computes for the same prompts.

    Keys and values stay as transformers computed them.
    """
    decode, trace = functools.partial(nemotron_h, *read(path)), []
    tokens, long = arrays["prompt"][0].tolist(), arrays["long_tokens"][0]
    decode(tokens, trace=trace)
    layers = sorted(
        name.removesuffix("conv0") for name in arrays if name.startswith("prompt") and name.endswith("conv0")
    )
    states = {}
    for layer, (inputs, after) in zip(layers, trace, strict=True):
        states |= {f"{layer}conv0": inputs[-4:].T[None], f"{layer}rec0": after[-1][None]}
    tokens = greedy(decode, tokens, 69)
    new = {"tokens": tokens[None], "logits": decode(tokens), "long_last_logits": decode(long)[-16:]}
    return arrays | states | new


@functools.cache
def reference(path):
    """The arrays of a folder's `reference.npz`, by name, as transformers computed them.

    Nemotron-H's are computed here: transformers clamps the step sizes of its prompts, which no other implementation does.
    """
    arrays = dict(np.load(path / "reference.npz"))
    return without_clamp(path, arrays) if path.name == "nemotron_h" else arrays


def jamba(config, tensors, tokens):
    epsilon = config["rms_norm_eps"]

    def feed_forward(w, x):
        if "router.weight" not in w:
            return gated_mlp(w, x)
        scores = softmax(project(w, "router", x))
        expert = lambda e, x: gated_mlp(under(w, f"experts.{e}"), x)
        return mixture(x, scores, config["num_experts_per_tok"], expert, normalise=False)

    def layer(_, w, x):
        normed = rms(x, epsilon) * w["input_layernorm.weight"]
        if "self_attn.q_proj.weight" in w:
            heads = config["num_attention_heads"], config["num_key_value_heads"]
            x = x + attention(under(w, "self_attn"), normed, *heads)
        else:
            x = x + mamba1(under(w, "mamba"), normed, norm_epsilon=epsilon)[0]
        return x + feed_forward(under(w, "feed_forward"), rms(x, epsilon) * w["pre_ff_layernorm.weight"])

    return causal_lm(config, tensors, tokens, layer, norm="final_layernorm")


def granitemoehybrid(config, tensors, tokens):
    epsilon, scale = config["rms_norm_eps"], config["residual_multiplier"]

    def fused(into, out, x):
        gate, up = np.split(x @ into.T, 2, axis=1)
        return (silu(gate) * up) @ out.T

    def feed_forward(w, x):
        out = fused(w["shared_mlp.input_linear.weight"], w["shared_mlp.output_linear.weight"], x)
        if "block_sparse_moe.router.layer.weight" in w:
            w = under(w, "block_sparse_moe")
            expert = lambda e, x: fused(w["input_linear.weight"][e], w["output_linear.weight"][e], x)
            # A softmax over the chosen experts is the softmax over all of them, scaled to a sum of one.
            out = out + mixture(x, softmax(project(w, "router.layer", x)), config["num_experts_per_tok"], expert)
        return out

    def layer(_, w, x):
        normed = rms(x, epsilon) * w["input_layernorm.weight"]
        if "self_attn.q_proj.weight" in w:
            heads = config["num_attention_heads"], config["num_key_value_heads"]
            theta = config["rope_theta"] if config["position_embedding_type"] == "rope" else None
            scores = dict(scale=config["attention_multiplier"], theta=theta)
            out = attention(under(w, "self_attn"), normed, *heads, **scores)
        else:
            out = mamba2(under(w, "mamba"), normed, state_dim=config["mamba_d_state"], epsilon=epsilon)[0]
        x = x + scale * out
        return x + scale * feed_forward(w, rms(x, epsilon) * w["post_attention_layernorm.weight"])

    return causal_lm(config, tensors, tokens, layer) / config["logits_scaling"]


def falcon_h1(config, tensors, tokens):
    c, epsilon = config, config["rms_norm_eps"]

    def layer(_, w, x):
        normed = rms(x, epsilon) * w["input_layernorm.weight"]
        mamba = mamba2(
            under(w, "mamba"), normed * c["ssm_in_multiplier"], state_dim=c["mamba_d_state"], epsilon=epsilon,
            norm=c["mamba_rms_norm"], norm_before_gate=c["mamba_norm_before_gate"], multipliers=c["ssm_multipliers"],
        )[0]  # fmt: skip
        attended = attention(
            under(w, "self_attn"), normed * c["attention_in_multiplier"], c["num_attention_heads"],
            c["num_key_value_heads"], theta=c["rope_theta"], key_scale=c["key_multiplier"],
        )  # fmt: skip
        x = x + mamba * c["ssm_out_multiplier"] + attended * c["attention_out_multiplier"]
        gate, down = c["mlp_multipliers"]
        return x + down * gated_mlp(under(w, "feed_forward"), rms(x, epsilon) * w["pre_ff_layernorm.weight"], gate)

    return causal_lm(config, tensors, tokens, layer, norm="final_layernorm") * c["lm_head_multiplier"]


def qwen(config, tensors, tokens):
    """Qwen3.5 and Qwen3-Next, dense or sparse."""
    # Norms are stored as offsets from one, except those of the delta nets.
    offset = lambda name: name.endswith("norm.weight") and "linear_attn" not in name
    tensors = {name: value + 1 if offset(name) else value for name, value in tensors.items()}
    epsilon, key_heads = config["rms_norm_eps"], config["linear_num_key_heads"]
    rope = config["rope_parameters"]

    def linear(w, x):
        if "in_proj_qkv.weight" in w:
            qkv, z, b, a = (project(w, f"in_proj_{part}", x) for part in ("qkv", "z", "b", "a"))
        else:
            keys, ratio = config["linear_key_head_dim"], config["linear_num_value_heads"] // key_heads
            values, flat = ratio * config["linear_value_head_dim"], lambda y: y.reshape(len(x), -1)
            heads = project(w, "in_proj_qkvz", x).reshape(len(x), key_heads, -1)
            *qkv, z = map(flat, np.split(heads, np.cumsum([keys, keys, values]), axis=2))
            qkv = np.concatenate(qkv, axis=1)
            b, a = map(flat, np.split(project(w, "in_proj_ba", x).reshape(len(x), key_heads, -1), 2, axis=2))
        return project(w, "out_proj", delta_net(w, qkv, z, a, b, key_heads, w["norm.weight"], epsilon))

    def full(w, x):
        heads = lambda name: project(w, name, x).reshape(len(x), -1, config["head_dim"] * (1 + (name == "q_proj")))
        (q, gate), k = np.split(heads("q_proj"), 2, axis=2), heads("k_proj")
        q, k = rms(q, epsilon) * w["q_norm.weight"], rms(k, epsilon) * w["k_norm.weight"]
        dims = int(config["head_dim"] * rope["partial_rotary_factor"])
        turn = lambda y: np.concatenate([rotate(y[..., :dims], rope["rope_theta"]), y[..., dims:]], axis=-1)
        return project(w, "o_proj", attend(turn(q), turn(k), heads("v_proj")) * sigmoid(gate.reshape(len(x), -1)))

    def layer(_, w, x):
        mixer = (linear, "linear_attn") if "linear_attn.A_log" in w else (full, "self_attn")
        x = x + mixer[0](under(w, mixer[1]), rms(x, epsilon) * w["input_layernorm.weight"])
        return x + feed_forward(config, under(w, "mlp"), rms(x, epsilon) * w["post_attention_layernorm.weight"])

    return causal_lm(config, tensors, tokens, layer)


def olmo(config, tensors, tokens):
    epsilon, theta = config["rms_norm_eps"], config["rope_parameters"].get("rope_theta")
    released = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    for old, new in released.items():
        tensors = {name.replace(old, new): value for name, value in tensors.items()}

    def linear(w, x):
        qkv = np.concatenate([project(w, f"{part}_proj", x) for part in "qkv"], axis=1)
        w = w | {"conv1d.weight": np.concatenate([w[f"{part}_conv1d.weight"] for part in "qkv"])}
        z, a, b = (project(w, f"{part}_proj", x) for part in "gab")
        scale = 1 + config["linear_allow_neg_eigval"]
        return project(
            w, "o_proj", delta_net(w, qkv, z, a, b, config["linear_num_key_heads"], w["o_norm.weight"], 1e-5, scale)
        )

    def full(w, x):
        heads = lambda y, number: y.reshape(len(x), number, -1)
        q, k = (rms(project(w, f"{part}_proj", x), epsilon) * w[f"{part}_norm.weight"] for part in "qk")
        q, k = heads(q, config["num_attention_heads"]), heads(k, config["num_key_value_heads"])
        q, k = (rotate(q, theta), rotate(k, theta)) if theta else (q, k)
        return project(w, "o_proj", attend(q, k, heads(project(w, "v_proj", x), config["num_key_value_heads"])))

    def layer(_, w, x):
        norm = lambda name, y: rms(y, epsilon) * w[f"{name}.weight"]
        mlp = lambda y: gated_mlp(under(w, "mlp"), y)
        if "linear_attn.A_log" in w:
            x = x + linear(under(w, "linear_attn"), norm("input_layernorm", x))
            return x + mlp(norm("post_attention_layernorm", x))
        x = x + norm("post_attention_layernorm", full(under(w, "self_attn"), x))
        return x + norm("post_feedforward_layernorm", mlp(x))

    return causal_lm(config, tensors, tokens, layer)


def kimi_mixture(x, w, c):
    """The experts of Kimi Linear and Ling 3: each token chooses groups first, and then experts in them."""
    run = lambda x, names: gated_product(x, *(w[f"{name}.weight"] for name in names))
    out = run(x, [f"shared_experts.{name}_proj" for name in ("gate", "up", "down")])
    bias = w["gate.e_score_correction_bias"] if "gate.e_score_correction_bias" in w else w["gate.expert_bias"]
    names = ("w1", "w3", "w2") if "experts.0.w1.weight" in w else ("gate_proj", "up_proj", "down_proj")
    groups, chosen_groups, chosen = c["num_expert_group"], c["topk_group"], c["num_experts_per_token"]
    for n, token in enumerate(x):
        score = sigmoid(w["gate.weight"] @ token)
        choice = (score + bias).reshape(groups, -1)
        group_score = np.sort(choice, 1)[:, -2:].sum(1)
        choice[np.argsort(-group_score)[chosen_groups:]] = -np.inf
        experts = np.argsort(-choice.reshape(-1))[:chosen]
        weight = score[experts] / score[experts].sum() if c.get("moe_renormalize", True) else score[experts]
        for expert, share in zip(experts, weight * c["routed_scaling_factor"], strict=True):
            out[n] += share * run(token, [f"experts.{expert}.{name}" for name in names])
    return out


def gated_product(x, gate, up, down):
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def kimi(c, kinds, tensors, tokens):
    """Kimi Linear and Ling 3. `c` has Kimi's names of the fields; `kinds` names the kind of each layer."""
    tensors = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    x = tensors["model.embed_tokens.weight"][tokens]
    heads, dim, epsilon = c["linear_num_heads"], c["linear_head_dim"], c["rms_norm_eps"]
    for n, kind in enumerate(kinds):
        w = under(tensors, f"model.layers.{n}")
        normed, mixer = rms(x, epsilon) * w["input_layernorm.weight"], under(w, "self_attn")
        if kind == "linear_attention":
            state, window = np.zeros((heads, dim, dim)), np.zeros((c["linear_conv_kernel_dim"] - 1, 3 * heads * dim))
            out, _, _ = kimi_delta_attention(normed, mixer, heads, epsilon, state, window, c.get("lower_bound"))
        else:
            sizes = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
            history = np.zeros((0, c["kv_lora_rank"] + c["qk_rope_head_dim"]))
            out, _ = multi_head_latent_attention(normed, mixer, *sizes, history, c.get("rope_theta"))
        x = x + out
        normed = rms(x, epsilon) * w["post_attention_layernorm.weight"]
        mlp = under(w, "block_sparse_moe") | under(w, "mlp")
        x = x + (gated_mlp(mlp, normed) if "gate_proj.weight" in mlp else kimi_mixture(normed, mlp, c))
    return rms(x, epsilon) * tensors["model.norm.weight"] @ tensors["lm_head.weight"].T


def zamba2(config, tensors, tokens):
    epsilon, heads, dtype = config["rms_norm_eps"], config["num_attention_heads"], np.float64
    kinds = config["layers_block_type"]
    hybrid, passed, blocks = [n for n, kind in enumerate(kinds) if kind == "hybrid"], [], config["num_mem_blocks"]
    embedded = tensors["model.embed_tokens.weight"][np.asarray(tokens)].astype(dtype)
    erf = np.vectorize(math.erf)
    adapted = lambda w, name, adapter, x: (
        project(w, name, x) + project(w, f"{adapter}.1", project(w, f"{adapter}.0", x))
    )

    def block(w, turn, x):
        both = rms(np.concatenate([x, embedded], axis=1), epsilon) * w["input_layernorm.weight"]
        a, of = under(w, "self_attn"), lambda y: y.reshape(len(x), heads, -1)
        if config["use_shared_attention_adapter"]:
            q, k, v = (of(adapted(a, f"{n}_proj", f"linear_{n}_adapter_list.{turn}", both)) for n in "qkv")
        else:
            q, k, v = (of(project(a, f"{n}_proj", both)) for n in "qkv")
        if config["use_mem_rope"]:
            theta = config["rope_parameters"]["rope_theta"]
            q, k = rotate(q, theta), rotate(k, theta)
        out = project(a, "o_proj", attend(q * 2**0.5, k, v))
        out, f = rms(out, epsilon) * w["pre_ff_layernorm.weight"], under(w, "feed_forward")
        gate, up = np.split(adapted(f, "gate_up_proj", f"gate_up_proj_adapter_list.{turn}", out), 2, axis=1)
        return project(f, "down_proj", gate * (1 + erf(gate / 2**0.5)) / 2 * up)

    def layer(number, w, x):
        heard = 0.0
        if kinds[number] == "hybrid":
            turn = len(passed)
            passed.append(number)
            shared = under(tensors, f"model.layers.{hybrid[turn % blocks]}.shared_transformer")
            heard = project(w, "linear", block(shared, turn, x))
            w = under(w, "mamba_decoder")
        normed = rms(x + heard, epsilon) * w["input_layernorm.weight"]
        return x + mamba2(under(w, "mamba"), normed, state_dim=config["mamba_d_state"], epsilon=1e-5)[0]

    return causal_lm(config, tensors, tokens, layer, norm="final_layernorm")
