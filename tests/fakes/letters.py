"""A tokenizer for the speller: a letter for each token, so that the text of known tokens is known."""


class Letters:
    """Token t is the character number 60 + t. `broken` tokens make it raise."""

    def __init__(self, broken=()):
        self.broken = frozenset(broken)

    def encode(self, text, *, add_special_tokens=True):
        return [ord(letter) - 60 for letter in text]

    def decode(self, token_ids, *, skip_special_tokens=True):
        if not self.broken.isdisjoint(token_ids):
            raise LookupError("no such letter")
        return "".join(chr(60 + token) for token in token_ids)
