"""The names of the runtime that commands build their requests with: the command line knows no room but this one."""

from ppd_runtime import Generation, Settings, Typical, load_model, read_prompts
from ppd_runtime.hf import embedding_size
from ppd_runtime.prompt_tokens import check_base_model
from ppd_runtime.token_files import load_prompt_tokens, push_prompt_tokens
from ppd_runtime.train import TrainingPlan

__all__ = [
    "Generation",
    "Settings",
    "TrainingPlan",
    "Typical",
    "check_base_model",
    "embedding_size",
    "load_model",
    "load_prompt_tokens",
    "push_prompt_tokens",
    "read_prompts",
]
