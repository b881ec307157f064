"""Writes what the engine itself answers to the calls of the clients, as JSON: see `run.py`."""

import argparse
import json
from pathlib import Path

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.engine.grammar import Grammar
from mamba_align_jax.engine.text.chat_template import load_chat_template

HERE = Path(__file__).parent
# The server's options and the engine's configuration.
SIZES = dict(max_num_seqs=4, max_num_batched_tokens=128, max_prefill_rows=2, max_model_len=1024)
PROMPT = "def read(self, size):\n    "
SCHEMA = dict(
    type="object",
    properties=dict(name=dict(type="string", maxLength=12), size=dict(type="integer"), ready=dict(type="boolean")),
    required=["name", "size", "ready"],
    additionalProperties=False,
)
# Calls as the API takes them. Those with "messages" are chats.
CALLS = {
    "greedy": dict(prompt=PROMPT, max_tokens=24, temperature=0),
    "tokens": dict(prompt=[ord(character) for character in "class Reader:\n"], max_tokens=16, temperature=0),
    "drawn": dict(prompt=PROMPT, max_tokens=24, temperature=0.8, top_p=0.9, seed=11, n=3),
    "stopped": dict(prompt=PROMPT, max_tokens=64, temperature=0, stop=["\n", "never there"]),
    "several": dict(prompt=[PROMPT, "import ", "The module "], max_tokens=12, temperature=0),
    "penalised": dict(
        prompt=PROMPT, max_tokens=24, temperature=0, presence_penalty=0.7, frequency_penalty=0.4, logit_bias={"32": -2}
    ),
    "logprobs": dict(prompt=PROMPT, max_tokens=8, temperature=0, logprobs=3),
    "echoed": dict(prompt=PROMPT, max_tokens=1, temperature=0, logprobs=2, echo=True),
    "chat": dict(messages=[dict(role="user", content="What is a module?")], max_tokens=24, temperature=0),
    "chat logprobs": dict(
        messages=[dict(role="system", content="Be brief."), dict(role="user", content="What is a list?")],
        max_tokens=8, temperature=0, logprobs=True, top_logprobs=2,
    ),
    "schema": dict(
        messages=[dict(role="user", content="Describe a file.")], max_tokens=200, temperature=0.7, seed=3,
        response_format=dict(type="json_schema", json_schema=dict(name="file", schema=SCHEMA)),
    ),
}  # fmt: skip


def params_of(call):
    """Returns the parameters with which the engine is to answer a call."""
    fields = {name: value for name, value in call.items() if name not in ("prompt", "messages", "n", "echo")}
    if "top_logprobs" in fields:
        fields["logprobs"] = fields.pop("top_logprobs")
    if call.get("echo"):
        fields["prompt_logprobs"] = fields["logprobs"]
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    if "response_format" in fields:
        schema = fields.pop("response_format")["json_schema"]["schema"]
        fields["grammar"] = Grammar("json_schema", json.dumps(schema))
    return SamplingParams(**fields)


def choice(output):
    """Returns an output as JSON."""
    pairs = lambda entries: entries and [entry and [entry.logprob, list(map(list, entry.top))] for entry in entries]
    return dict(
        text=output.text,
        token_ids=output.token_ids,
        prompt_tokens=len(output.prompt_token_ids),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        logprobs=pairs(output.logprobs),
        prompt_logprobs=pairs(output.prompt_logprobs),
    )


def answer(engine, template, call):
    """Returns the engine's choices for a call."""
    prompts = call.get("prompt") or engine.tokenizer.encode(template.render(call["messages"]))
    return [choice(output) for output in engine.generate(prompts, params_of(call), n=call.get("n", 1))]


def likelihoods(engine, documents):
    """Returns the sum of log-probabilities of each choice of each document, as lm-eval computes it."""
    found = []
    for document in documents:
        # lm-eval counts the spaces at the end of a question to the answer.
        context = engine.tokenizer.encode(document["question"].rstrip())
        for text in document["choices"]:
            tokens = engine.tokenizer.encode(document["question"] + text)
            (output,) = engine.generate(tokens, SamplingParams(max_tokens=1, prompt_logprobs=0))
            found.append(sum(entry.logprob for entry in output.prompt_logprobs[len(context) :]))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    # Both run in float32, so that rounding does not decide between tokens.
    engine = Engine.from_pretrained(BYTE_MODEL, EngineConfig(**SIZES), dtype="float32")
    template = load_chat_template(BYTE_MODEL)
    answers = {name: dict(call=call, choices=answer(engine, template, call)) for name, call in CALLS.items()}
    documents = [json.loads(line) for line in (HERE / "lm_eval_tasks" / "code.jsonl").read_text().splitlines()]
    options.file.write_text(json.dumps(dict(calls=answers, likelihoods=likelihoods(engine, documents))))


if __name__ == "__main__":
    main()
