"""The fields of calls in OpenAI's API, and in what vLLM and SGLang add to it: what each of them does here."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

CHAT, COMPLETIONS = "chat", "completions"
_BOTH = (CHAT, COMPLETIONS)
_OPENAI, _VLLM, _SGLANG = "OpenAI", "vLLM", "SGLang"
_ALL, _PEERS = (_OPENAI, _VLLM, _SGLANG), (_VLLM, _SGLANG)


class ApiField(NamedTuple):
    """A field of a call's body.

    Attributes:
        name: Its name.
        of: The APIs that have it.
        at: The endpoints that know it.
        use: "used", "ignored" (it changes no answer), or "refused".
        neutral: The values of a refused field that ask for nothing, and are taken.
        instead: Why the other values are refused, or what to use instead of them.
    """

    name: str
    of: tuple[str, ...]
    at: tuple[str, ...]
    use: str
    neutral: tuple[Any, ...] = ()
    instead: str = ""

    def takes(self, value: Any) -> bool:
        """Returns whether a value that no endpoint reads changes no answer. True is not 1 here."""
        same = (one == value and isinstance(one, bool) == isinstance(value, bool) for one in self.neutral)
        return self.use == "ignored" or any(same)


def _rows(use: str, of: tuple[str, ...], at: tuple[str, ...], *names: str) -> tuple[ApiField, ...]:
    return tuple(ApiField(name, of, at, use) for name in names)


def _refused(
    of: tuple[str, ...], at: tuple[str, ...], instead: str, **neutral: tuple[Any, ...]
) -> tuple[ApiField, ...]:
    return tuple(ApiField(name, of, at, "refused", taken, instead) for name, taken in neutral.items())


_TEXT_ONLY = "the model reads and writes text only"
_NO_BEAMS = "beams are not searched: use n"
_GRAMMAR = "use structured_outputs"
_STOPS = "stop strings are left out: add stop_reason to the text"
_WHOLE_PROMPT = "a prompt is never cut: send a shorter one"
_REASONING = "reasoning is always apart from the answer: use include_reasoning"
_ROUTER = "a router in front of the server chooses where a call runs"

FIELDS: tuple[ApiField, ...] = (
    *_rows("used", _ALL, _BOTH, "model", "max_tokens", "temperature", "top_p", "n", "seed", "stop", "stream"),
    *_rows("used", _ALL, _BOTH, "stream_options", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs"),
    *_rows("used", _ALL, _BOTH, "response_format"),
    *_rows("used", _ALL, (CHAT,), "messages", "max_completion_tokens", "top_logprobs"),
    *_rows("used", _ALL, (CHAT,), "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"),
    *_rows("used", _ALL, (COMPLETIONS,), "prompt", "echo", "best_of"),
    *_rows("used", _PEERS, _BOTH, "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"),
    *_rows("used", _PEERS, _BOTH, "priority", "cache_salt", "return_token_ids"),
    *_rows("used", _PEERS, _BOTH, "skip_special_tokens"),
    *_rows("used", (_VLLM,), _BOTH, "structured_outputs"),
    *_rows("used", _PEERS, (CHAT,), "chat_template_kwargs", "include_reasoning"),
    *_rows("used", (_VLLM,), (CHAT,), "add_generation_prompt"),
    *_rows("used", (_VLLM,), (COMPLETIONS,), "add_special_tokens"),
    *_rows("ignored", (_OPENAI,), _BOTH, "metadata", "safety_identifier", "service_tier", "store", "prompt_cache_key"),
    *_rows("ignored", (_OPENAI,), _BOTH, "prompt_cache_retention"),
    *_rows("ignored", _ALL, _BOTH, "user"),
    # Guesses of the answer make it come sooner at most.
    *_rows("ignored", (_OPENAI,), (CHAT,), "prediction"),
    *_rows("ignored", (_VLLM,), _BOTH, "request_id", "stream_interval", "truncation_side", "guided_decoding_backend"),
    *_rows("ignored", _PEERS, _BOTH, "session_id"),
    *_rows("ignored", (_SGLANG,), _BOTH, "rid", "custom_labels"),
    *_refused((_OPENAI,), (CHAT,), "use tools", functions=([],)),
    *_refused((_OPENAI,), (CHAT,), "use tool_choice", function_call=("none", "auto")),
    *_refused((_OPENAI,), (CHAT,), _TEXT_ONLY, modalities=(["text"],), audio=()),
    *_refused((_OPENAI,), (CHAT,), "the server searches nothing", web_search_options=()),
    *_refused((_OPENAI,), (CHAT,), "say it in the messages", verbosity=("medium",)),
    *_refused(_ALL, (COMPLETIONS,), "write it into the prompt, in the model's own form", suffix=("",)),
    *_refused((_VLLM,), (CHAT,), "use n", best_of=(1,)),
    *_refused((_VLLM,), _BOTH, _NO_BEAMS, use_beam_search=(False,), length_penalty=(1,), early_stopping=(False,)),
    *_refused((_VLLM,), _BOTH, _STOPS, include_stop_str_in_output=(False,)),
    *_refused((_VLLM,), _BOTH, "the tokenizer decides it", spaces_between_special_tokens=(True,)),
    *_refused((_VLLM,), _BOTH, _WHOLE_PROMPT, truncate_prompt_tokens=()),
    *_refused((_VLLM,), _BOTH, "use logit_bias, or structured_outputs", allowed_token_ids=([],), bad_words=([],)),
    *_refused((_VLLM,), _BOTH, "use echo with logprobs in /v1/completions", prompt_logprobs=()),
    *_refused((_VLLM,), (CHAT,), "use top_logprobs", logprob_token_ids=()),
    *_refused((_VLLM,), (COMPLETIONS,), "use logprobs", logprob_token_ids=()),
    *_refused((_VLLM,), _BOTH, "use return_token_ids", return_tokens_as_token_ids=(False,), detokenize=(True,)),
    *_refused((_VLLM,), _BOTH, "use /tokenize", return_token_offsets=(False,), return_prompt_text=(False,)),
    *_refused((_VLLM,), _BOTH, _GRAMMAR, guided_json=(), guided_regex=(), guided_choice=(), guided_grammar=()),
    *_refused((_VLLM,), _BOTH, _GRAMMAR, guided_json_object=(False,), guided_whitespace_pattern=()),
    *_refused((_VLLM,), _BOTH, "it is not built: use a penalty", repetition_detection=()),
    *_refused((_VLLM,), _BOTH, "it is not built: use max_tokens", thinking_token_budget=(-1,)),
    *_refused((_VLLM,), _BOTH, "no code of a caller runs here", logits_processors=([],), vllm_xargs=({},)),
    *_refused(
        (_VLLM,), _BOTH, "cached prefixes move by the operator", kv_transfer_params=({},), ec_transfer_params=({},)
    ),
    *_refused((_VLLM,), _BOTH, "it is not built", watermarking=(False,)),
    *_refused((_VLLM,), _BOTH, _TEXT_ONLY, prompt_embeds=(), mm_processor_kwargs=({},), media_io_kwargs=({},)),
    *_refused((_VLLM,), _BOTH, _TEXT_ONLY, return_mm_kwargs=(True,)),
    *_refused((_VLLM,), (CHAT,), "an answer never begins with the last message", echo=(False,)),
    *_refused((_VLLM,), (CHAT,), "the chat template writes them", add_special_tokens=(False,)),
    *_refused((_VLLM,), (CHAT,), "use chat_template_kwargs", documents=([],)),
    *_refused((_VLLM,), (CHAT,), "the operator chooses it: --chat-template", chat_template=()),
    *_refused(_PEERS, (CHAT,), "it is not built: use /v1/completions", continue_final_message=(False,)),
    *_refused((_SGLANG,), (CHAT,), "use /v1/completions", input_ids=()),
    *_refused((_SGLANG,), _BOTH, _GRAMMAR, regex=(), ebnf=(), stop_regex=([],)),
    *_refused((_SGLANG,), (COMPLETIONS,), "use response_format", json_schema=()),
    *_refused((_SGLANG,), _BOTH, _STOPS, no_stop_trim=(False,)),
    *_refused((_SGLANG,), _BOTH, "use cache_salt", extra_key=("",)),
    *_refused((_SGLANG,), _BOTH, "usage says it in every answer", return_cached_tokens_details=(False,)),
    *_refused((_SGLANG,), _BOTH, "they are not shown", return_hidden_states=(False,), return_routed_experts=(False,)),
    *_refused((_VLLM,), _BOTH, "they are not shown", routed_experts_prompt_start=(0,)),
    *_refused((_SGLANG,), _BOTH, "they are not shown", routed_experts_start_len=(0,)),
    *_refused((_SGLANG,), _BOTH, "adapters are not built", lora_path=()),
    *_refused((_SGLANG,), _BOTH, "no code of a caller runs here", custom_logit_processor=(), custom_params=({},)),
    *_refused((_SGLANG,), _BOTH, "send the whole prompt: its prefix is cached", session_params=({},)),
    *_refused((_SGLANG,), _BOTH, "prompt lookup reads the prompt alone", ngram_corpus_id=()),
    *_refused((_SGLANG,), _BOTH, _TEXT_ONLY, images_config=({},), max_dynamic_patch=(), min_dynamic_patch=()),
    *_refused((_SGLANG,), _BOTH, _ROUTER, bootstrap_host=(), bootstrap_port=(), bootstrap_room=()),
    *_refused((_SGLANG,), _BOTH, _ROUTER, routed_dp_rank=(), disagg_prefill_dp_rank=(), data_parallel_rank=()),
    *_refused((_SGLANG,), (CHAT,), _REASONING, separate_reasoning=(True,), stream_reasoning=(True,)),
)


def fields_at(endpoint: str) -> Mapping[str, ApiField]:
    """Returns the fields of an endpoint by their names."""
    return MappingProxyType({field.name: field for field in FIELDS if endpoint in field.at})


def table() -> str:
    """Returns the fields that are ignored or refused as a table of Markdown."""
    lines = ["| field | of | at | here |", "|---|---|---|---|"]
    for field in FIELDS:
        if field.use != "used":
            at = "both" if len(field.at) > 1 else field.at[0]
            lines.append(f"| `{field.name}` | {', '.join(field.of)} | {at} | {_use(field)} |")
    return "\n".join(lines)


def _use(field: ApiField) -> str:
    if field.use == "ignored":
        return "changes nothing"
    taken = " or ".join(f"`{json.dumps(one)}`" for one in field.neutral)
    return f"refused{f' unless {taken}' if taken else ''}: {field.instead}"
