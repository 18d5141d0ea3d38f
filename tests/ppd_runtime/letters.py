"""A tokenizer without files: one token per lower case letter."""

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def letters() -> PreTrainedTokenizerFast:
    """Make the tokenizer: a is 1, b is 2, .., space is 27; what it does not know is 0."""
    vocabulary = {"?": 0, **{letter: i + 1 for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz \n")}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
