"""Guess the next character of a text of your own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from freewheel.errors import ConfigError, at_least, first_line
from freewheel.tasks.guessing import Guessing
from freewheel.tasks.nets import GPT

EVALUATED = 16384  # how many characters are guessed in an evaluation, at most (and at least one window)


@dataclass
class Chars(Guessing):
    """A small GPT reads windows of a text and guesses each next character.

    The first nine tenths of the text are trained on (all workers draw windows from all of it), the last
    tenth is for evaluation. The characters that occur are the vocabulary.

    Settings: data (a text file in UTF-8), context (characters it sees at once), width, layers, heads,
    batch_size (windows).
    """

    lr: ClassVar[float] = 0.2

    data: str = ""
    context: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4
    batch_size: int = 32

    def __post_init__(self) -> None:
        for name in ("context", "width", "layers", "heads", "batch_size"):
            at_least(f"chars: {name}", getattr(self, name), 1)
        if self.width % self.heads:
            raise ConfigError(
                f"chars: a width of {self.width} does not divide into {self.heads} heads. Take others."
            )

    def prepare(self, workers: int, seed: int) -> None:
        if not self.data:
            raise ConfigError(
                "chars: no text given. Name a text file: --task chars:data=PATH, or --data PATH."
            )
        path = Path(self.data).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"chars: cannot read {path} ({first_line(error)}). Give a text file in UTF-8."
            ) from None
        least = 10 * (self.context + 1)
        if len(text) < least:
            raise ConfigError(
                f"chars: {path} has {len(text)} characters; a context of {self.context} needs at least "
                f"{least} (a tenth is kept for evaluation). Give a longer text or a smaller context."
            )
        codes = torch.frombuffer(bytearray(text, "utf-32-le"), dtype=torch.int32)
        alphabet, numbers = torch.unique(codes, return_inverse=True)
        self.alphabet = "".join(map(chr, alphabet.tolist()))
        self.text, self.test_text = numbers.tensor_split([len(text) - len(text) // 10])
        self.window = torch.arange(self.context + 1)
        self.to(self.device)

    def model(self) -> nn.Module:
        return GPT(len(self.alphabet), self.context, self.width, self.layers, self.heads)

    def batch(self, worker: int, generator: torch.Generator) -> Any:
        starts = len(self.text) - self.context
        return self._windows(self.text, torch.randint(starts, (self.batch_size,), generator=generator))

    def evaluate(self, model: nn.Module) -> tuple[float, float | None]:
        return self._measure(model, *self._fixed(self.test_text))

    def score(self, model: nn.Module) -> float:
        return self._measure(model, *self._fixed(self.text))[0]

    def _fixed(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Windows side by side, or further apart where the text is long."""
        fit = (len(text) - 1) // self.context
        count = min(fit, max(1, EVALUATED // self.context))
        return self._windows(text, torch.arange(count) * fit // count * self.context)

    def _windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Windows that begin at these places, and for each of their characters the one that follows."""
        windows = text[starts.to(self.device).unsqueeze(1) + self.window]
        return windows[:, :-1], windows[:, 1:]
