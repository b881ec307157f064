"""Options of `vllm serve` for `mamba-align serve`, beside those that have vLLM's names anyway.

Those that mean the same here are taken. The usual others are refused, each with what to use instead.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mamba_align_jax.errors import FieldError
from mamba_align_jax.serve.settings import REASONING_PARSERS, TOOL_CALL_PARSERS

# Names of fields of EngineConfig for which vLLM has another one.
NAMES: Mapping[str, str] = MappingProxyType(
    {"prefix_cache": "mamba_cache_mode", "block_size": "mamba_block_size", "async_stepping": "async_scheduling"}
)
# Forms of tool calls and of reasoning for which vLLM has other names.
VLLM_TOOL_FORMS: Mapping[str, str] = MappingProxyType(
    {"qwen3": "qwen3_xml", "qwen3_coder": "qwen3_xml", "kimi_k2": "kimi", "ling3": "ling"}
)
VLLM_REASONING_FORMS: Mapping[str, str] = MappingProxyType(
    {**dict.fromkeys(("qwen3", "deepseek_r1", "nemotron_v3", "ling3"), "think"), "kimi_k2": "kimi"}
)
_LEAVE_OUT = "leave it out"
REFUSED = {
    "--block-size": "states and keys have sizes of their own, --mamba-block-size and --kv-page-size",
    "--mamba-ssm-cache-dtype": "use --state-dtype",
    "--mamba-cache-dtype": "use --state-dtype; the other states have the model's dtype",
    "--kv-cache-dtype": "keys have the model's dtype",
    "--prefix-cache-retention-interval": "use --checkpoint-interval",
    "--num-gpu-blocks-override": "use --num-state-blocks and --num-kv-pages",
    "--spec-method": "use --speculation, or --speculative-config",
    "--spec-tokens": "use --num-speculative-tokens, or --speculative-config",
    "--spec-model": "draft models are not built; --speculation mtp drafts with the model's own head",
    "--scheduling-policy": f"requests always run by priority, and those of equal priority as they came: {_LEAVE_OUT}",
    "--enable-chunked-prefill": f"prompts are always cut into chunks: {_LEAVE_OUT}",
    "--enforce-eager": f"steps are always compiled: {_LEAVE_OUT}; --warmup none compiles them when they are needed",
    "--trust-remote-code": f"no code of a model is run: {_LEAVE_OUT}",
    "--tokenizer": "the tokenizer is that of the model's directory",
    "--quantization": "use --weights-dtype, whose file keeps FP8 weights and whose fp8 makes them; no other kind is built",
    "--pipeline-parallel-size": "it is not built; use --tensor-parallel-size",
    "--data-parallel-size": "run several servers behind a router",
    "--enable-expert-parallel": "it is not built; --tensor-parallel-size splits experts",
    "--cpu-offload-gb": "weights and states stay on the device",
    "--enable-lora": "it is not built; merge the adapter into the model",
    "--limit-mm-per-prompt": "images and sound are not built",
    "--kv-events-config": "use --kv-events and --state-events",
    "--disable-uvicorn-access-log": f"calls are logged with --access-log only: {_LEAVE_OUT}",
    "--ssl-certfile": "the server has no TLS; use a proxy",
}


class _Refuse(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        parser.error(f"{option_string} of vLLM is not taken here: {self.const}")


def add_vllm_options(add: Callable[..., Any]) -> None:
    """Adds the options that are vLLM's, and those of vLLM's that are refused, which the help leaves out.

    `add` is the method `add_argument` of a parser or a group.
    """
    text = "--no-enable-prefix-caching is --mamba-cache-mode none"
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, help=text)
    text = 'drafts as vLLM\'s JSON: {"method": "mtp" or "ngram", "num_speculative_tokens": N}, and for ngram '
    text += '"prompt_lookup_max" and "prompt_lookup_min" (default: 5)'
    add("--speculative-config", "-sc", metavar="JSON", help=text)
    for name, instead in REFUSED.items():
        add(name, nargs="?", action=_Refuse, const=instead, help=argparse.SUPPRESS)


def add_parser_options(add: Callable[..., Any]) -> None:
    """Adds the options of the forms in which the model writes tool calls and reasoning. vLLM's names are taken too."""
    for option, what, names, others in (
        ("--tool-call-parser", "tool calls", TOOL_CALL_PARSERS, VLLM_TOOL_FORMS),
        ("--reasoning-parser", "its reasoning", REASONING_PARSERS, VLLM_REASONING_FORMS),
    ):
        text = (
            f"the form in which the model writes {what}: {', '.join(names)}; auto, the default, is the chat template's"
        )
        own_name = lambda name, others=others: others.get(name, name)
        add(option, type=own_name, choices=names, default="auto", metavar="NAME", help=text)
    # Tools are taken wherever the chat template uses them.
    add("--enable-auto-tool-choice", action="store_true", help=argparse.SUPPRESS)


def fields_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of EngineConfig that the options of `add_vllm_options` set.

    Raises:
        ValueError: an option has a wrong value.
    """
    fields = {} if options.speculative_config is None else _speculation(options.speculative_config)
    if options.enable_prefix_caching is False:
        fields["prefix_cache"] = "none"
    elif options.enable_prefix_caching and options.prefix_cache == "none":
        raise FieldError("mamba_cache_mode", "'align' or 'all' with --enable-prefix-caching", "'none'")
    return fields


def _speculation(text: str) -> dict[str, Any]:
    name = "speculative_config"
    try:
        given = json.loads(text)
    except ValueError as error:
        raise FieldError(name, f"a JSON object ({error})", repr(text)) from error
    if not isinstance(given, dict):
        raise FieldError(name, "a JSON object", repr(text))
    method = given.pop("method", None)
    if "num_speculative_tokens" not in given:
        raise FieldError(name, "have num_speculative_tokens", repr(text), "must")
    fields = {"num_speculative_tokens": given.pop("num_speculative_tokens")}
    if method == "ngram":
        longest, shortest = given.pop("prompt_lookup_max", None), given.pop("prompt_lookup_min", None)
        # What is left out is as long as the other, and both are 5 without either, as in vLLM.
        fields["prompt_lookup_max"] = next(value for value in (longest, shortest, 5) if value is not None)
        fields["prompt_lookup_min"] = next(value for value in (shortest, longest, 5) if value is not None)
        fields["speculation"] = "prompt_lookup"
    elif isinstance(method, str) and method.split("_")[-1] == "mtp":
        # vLLM has names of its own for the heads of some models, as "qwen3_next_mtp".
        fields["speculation"] = "mtp"
    else:
        raise FieldError(name, "have the method 'mtp' or 'ngram'", repr(method), "must")
    if given:
        raise FieldError(name, f"have the fields of method {method!r} only", f"{', '.join(given)} too", "must")
    return fields
