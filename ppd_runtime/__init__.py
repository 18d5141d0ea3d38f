"""Decode with a tree: any Hugging Face decoder, the same tokens, fewer passes.

``load_model -> generate`` is the short way; ``model.generate(.., custom_generate=ppd_runtime.custom_generate)`` the way
in from transformers.
"""

from ppd_runtime.custom import custom_generate, guess_source
from ppd_runtime.generate import Generation, TextPiece, generate, stream
from ppd_runtime.guesses import FreeGuesses, GuessSource, LookupGuesses, PromptGuesses, TextGuesser
from ppd_runtime.models import LoadedModel, load_model, wrap_model
from ppd_runtime.prompt_tokens import PromptTokens, random_prompt_tokens
from ppd_runtime.prompts import encode_prompt, read_prompts
from ppd_runtime.sampling import Typical
from ppd_runtime.settings import Settings
from ppd_runtime.token_files import load_prompt_tokens, save_prompt_tokens

__all__ = [
    "FreeGuesses",
    "Generation",
    "GuessSource",
    "LoadedModel",
    "LookupGuesses",
    "PromptGuesses",
    "PromptTokens",
    "Settings",
    "TextGuesser",
    "TextPiece",
    "Typical",
    "custom_generate",
    "encode_prompt",
    "generate",
    "guess_source",
    "load_model",
    "load_prompt_tokens",
    "random_prompt_tokens",
    "read_prompts",
    "save_prompt_tokens",
    "stream",
    "wrap_model",
]
