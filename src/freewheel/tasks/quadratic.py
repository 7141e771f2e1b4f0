"""A quadratic whose answer is known exactly."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from freewheel.errors import ConfigError, at_least
from freewheel.task import Task


class Point(nn.Module):
    """The point x that is to be found."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(size, dtype=torch.float64))


@dataclass
class Quadratic(Task):
    """Worker i wants x at o_i; together they want it where the mean of their losses is lowest.

        f_i(x) = 1/2 (x - o_i)ᵀ A_i (x - o_i),     f = mean_i f_i,     L = largest eigenvalue of any A_i

    Gradients carry noise ξ with E‖ξ‖² = sigma². With `clip` they are shortened to that norm, so that they
    are bounded as nodelay's L and DASGD's Q demand (the loss is then no longer theirs, the direction is).
    The optimum, f(optimum) and L are known; `evaluate` returns f(x) - f(optimum).

    Settings: size (dimension), sigma (noise), spread (how far apart the optima o_i lie), clip,
    alike (all A_i equal: then the mean of the o_i is the optimum).
    """

    lr: ClassVar[float] = 0.05

    size: int = 16
    sigma: float = 0.0
    spread: float = 1.0
    clip: float | None = None
    alike: bool = False

    def __post_init__(self) -> None:
        at_least("quadratic: size", self.size, 1)
        at_least("quadratic: sigma", self.sigma, 0)
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"quadratic: clip must be above 0, not {self.clip:g}.")

    def prepare(self, workers: int, seed: int) -> None:
        """Draw A_i with eigenvalues between 0.2 and 1, and optima o_i around (3, 3, …)."""
        generator = torch.Generator().manual_seed(seed)
        random = {"generator": generator, "dtype": torch.float64}
        n, d = workers, self.size
        turns = torch.linalg.qr(torch.randn(n, d, d, **random))[0]  # type: ignore[call-overload]
        eigenvalues = 0.2 + 0.8 * torch.rand(n, d, **random)  # type: ignore[call-overload]
        eigenvalues[:, 0] = 1.0  # so that L is known
        self.a = turns @ torch.diag_embed(eigenvalues) @ turns.mT
        if self.alike:
            self.a = self.a[:1].expand(n, d, d).contiguous()
        self.optima = 3.0 + self.spread * torch.randn(n, d, **random)  # type: ignore[call-overload]
        mean_a = self.a.mean(0)
        self.optimum = torch.linalg.solve(mean_a, (self.a @ self.optima.unsqueeze(-1)).mean(0).squeeze(-1))
        self.lowest = self.value(self.optimum)

    def value(self, x: Tensor) -> float:
        """f(x), the mean of all workers' losses."""
        away = x - self.optima
        return float(0.5 * torch.einsum("ni,nij,nj->n", away, self.a, away).mean())

    def model(self) -> nn.Module:
        return Point(self.size)

    def batch(self, worker: int, generator: torch.Generator) -> Any:
        noise = None
        if self.sigma:
            noise = torch.randn(self.size, generator=generator, dtype=torch.float64)
            noise *= self.sigma / self.size**0.5
        return self.a[worker], self.optima[worker], noise

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """f_i(x) + ξᵀx, or, clipped, a loss with the shortened gradient."""
        a, optimum, noise = batch
        x: Tensor = model.x  # type: ignore[assignment]
        away = x - optimum
        loss: Tensor = 0.5 * away @ (a @ away)
        if noise is not None:
            loss = loss + noise @ x
        if self.clip is not None:
            with torch.no_grad():
                gradient = a @ away + (0.0 if noise is None else noise)
                shorter = torch.clamp(self.clip / torch.linalg.vector_norm(gradient), max=1.0)
            loss = loss * shorter
        return loss

    def evaluate(self, model: nn.Module) -> tuple[float, float | None]:
        return self.value(model.x.detach()) - self.lowest, None  # type: ignore[operator]
