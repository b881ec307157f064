"""An engine's answers whose text is known, for tests of what a server makes of them."""

import itertools

from mamba_align_jax.data import encode
from mamba_align_jax.engine.scheduling.request import RequestOutput, RequestUpdate, TokenLogprobs
from mamba_align_jax.engine.text.generated_text import GeneratedText

END = 0  # the end token of the bundled tokenizer


class Script:
    """Stands for `AsyncEngine.generate`: every answer is `text`, in updates of so many tokens as `sizes` say in turn."""

    def __init__(self, tokenizer, text, sizes=(1,)):
        self.tokenizer, self.tokens, self.sizes = tokenizer, [*encode(text), END], sizes

    async def generate(self, prompt, params):
        text = GeneratedText.after(
            tuple(prompt), self.tokenizer, params.stop, skip_special_tokens=params.skip_special_tokens
        )
        said, shown, sizes, reason = [], 0, itertools.cycle(self.sizes), None
        while reason is None:
            new = []
            for token in self.tokens[len(said) :][: next(sizes)]:
                new.append(token)
                text = text.read_stop_token() if token == END else text.read([token])
                reason = _reason(token, text, len(said) + len(new), params)
                if reason:
                    text = text.ended()
                    break
            said += new
            output = reason and _output(prompt, said, reason, text)
            yield RequestUpdate(
                request_id=0,
                token_ids=tuple(new),
                text=text.shown[shown:],
                logprobs=params.logprobs if params.logprobs is None else tuple(TokenLogprobs(one, -1.0) for one in new),
                output=output,
            )
            shown = len(text.shown)


def _reason(token, text, num_tokens, params):
    if token == END or text.found is not None:
        return "stop"
    return "length" if num_tokens == params.max_tokens else None


def _output(prompt, tokens, reason, text):
    return RequestOutput(
        request_id=0,
        prompt_token_ids=tuple(prompt),
        token_ids=tuple(tokens),
        num_cached_tokens=0,
        cache_miss=None,
        checkpoint_at=(),
        num_draft_tokens=0,
        num_accepted_tokens=0,
        finish_reason=reason,
        token_times=(0.0,) * len(tokens),
        ttft_s=0.0,
        tpot_s=None,
        e2e_s=0.0,
        text=text.text,
        stop_reason=text.found,
    )
