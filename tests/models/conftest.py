"""Which cases of the model tests leave a quick run: each compiles a model, and the others have the same layers."""

import depth

# Test -> the models of a quick run.
QUICK = {
    "test_every_split_of_the_prompt_gives_the_same_logits": ("mamba2", "qwen3_5_text"),
    "test_every_split_of_a_prompt_matches_the_oracle": ("falcon_mamba",),
    "test_engine_generates_the_reference_tokens": (
        *("lfm2", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_text"),
    ),
    "test_logits_and_states_are_those_of_transformers": (
        *("bamba", "lfm2", "lfm2_moe", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_text", "qwen3_next"),
    ),
}


def pytest_collection_modifyitems(items):
    depth.keep_values([item for item in items if item.path.parent.name == "models"], QUICK, "name", "case")
