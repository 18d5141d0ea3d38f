"""Which token follows a node: greedy, sampled, or typical.

Verification walks from the root and asks, once per node it visits, which token comes next; it goes on while that token
is a child of the node. With a greedy or sampled answer the walk writes exactly what plain decoding would, whatever the
children are. Typical acceptance looks at the children and is *not* lossless.

Logits processors see what they would see in plain decoding: the scores of one position and the tokens before it, the
node's own path included.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from treeopt.errors import DecodeError, InvalidValueError

__all__ = ["TokenRule", "Typical", "check_processors", "generation_processors", "greedy_rule"]

EXACT_PROCESSORS = frozenset(
    {
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    }
)
"""Processors of transformers whose result depends on the scores and the tokens before them, and on nothing else."""


@dataclass(frozen=True, slots=True)
class Typical:
    """Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1; the paper's section 3). Not lossless.

    A child is acceptable when the model gives it more than ``min(epsilon, delta * exp(-entropy))``.

    Parameters
    ----------
    epsilon : float
        Threshold where the model is sure, in (0, 1).
    delta : float
        Factor that lowers the threshold where it is not, above 0.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < 1:
            raise InvalidValueError("epsilon", f"must lie between 0 and 1, not {self.epsilon!r}")
        if not self.delta > 0:
            raise InvalidValueError("delta", f"must be above 0, not {self.delta!r}")

    def threshold(self, probabilities: Tensor) -> Tensor:
        """Return the least acceptable probability, shape ``()`` from shape ``(vocabulary,)``."""
        entropy = -torch.special.xlogy(probabilities, probabilities).sum()
        return torch.minimum(entropy.new_tensor(self.epsilon), self.delta * torch.exp(-entropy))


@dataclass(slots=True)
class TokenRule:
    """How one text chooses its tokens.

    Parameters
    ----------
    processors : LogitsProcessorList
        Applied to the scores of every visited node.
    generator : torch.Generator, optional
        Sample with it; without it take the most probable token.
    typical : Typical, optional
        Accept children that are typical; needs a generator.
    """

    processors: LogitsProcessorList
    generator: torch.Generator | None = None
    typical: Typical | None = None

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the answer is the argmax of the model's own logits, which one call finds for all nodes."""
        return not self.processors and self.generator is None

    def next_token(self, logits: Tensor, before: Sequence[int], children: Mapping[int, int]) -> int:
        """Choose the token after a node.

        Parameters
        ----------
        logits : Tensor, float32, shape (vocabulary,)
            The model's logits at the node.
        before : sequence of int
            The text up to and including the node.
        children : mapping of token id to row
            The node's guesses, best rank first; only typical acceptance looks at them.

        Returns
        -------
        int
            A token id: a child's, if the walk is to go on to it.
        """
        scores = logits[None].clone()
        if self.processors:
            scores = self.processors(torch.tensor([before], device=logits.device), scores)
        if self.generator is None:
            return int(scores[0].argmax())
        probabilities = scores[0].softmax(-1)
        if not bool(probabilities.isfinite().all()):
            raise DecodeError("sampling: probabilities are not finite; raise the temperature or use a wider dtype")
        if self.typical is not None and children:
            least = self.typical.threshold(probabilities)
            for token in children:
                if probabilities[token] > least:
                    return token
        return int(torch.multinomial(probabilities, 1, generator=self.generator))


def greedy_rule() -> TokenRule:
    """Return plain greedy decoding."""
    return TokenRule(LogitsProcessorList())


def check_processors(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Refuse processors that a tree cannot apply exactly.

    Raises
    ------
    DecodeError
        With the processor's name: its result may depend on more than the scores and the tokens before them (state it
        keeps, passes of its own, the row of the batch), or it is unknown here.
    """
    for processor in processors:
        name = type(processor).__name__
        if name not in EXACT_PROCESSORS or not type(processor).__module__.startswith("transformers."):
            raise DecodeError(
                f"logits processor {name}: is not known to depend only on the scores and the tokens before them; leave "
                "it out or use the model's own generate"
            )
    return processors


def generation_processors(
    model: PreTrainedModel, config: GenerationConfig, *, prompt_length: int, max_new_tokens: int
) -> LogitsProcessorList:
    """Build the processors that ``model.generate`` would build from a generation config.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    config : GenerationConfig
        What to build; not changed.
    prompt_length : int
        Tokens of the prompt: minimum lengths count from there.
    max_new_tokens : int
        Forced end-of-text tokens count from there.

    Raises
    ------
    DecodeError
        When one of them cannot be applied to a tree.
    """
    config = copy.deepcopy(config)
    config.max_length = prompt_length + max_new_tokens
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=model.device)
    return check_processors(
        model._get_logits_processor(
            generation_config=config, input_ids_seq_length=prompt_length, device=str(model.device)
        )
    )
