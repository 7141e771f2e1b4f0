"""EAMSGD: EASGD whose workers use Nesterov momentum."""

from dataclasses import dataclass

from freewheel.errors import ConfigError
from freewheel.node import Node
from freewheel.strategies.easgd import EASGD


@dataclass
class EAMSGD(EASGD):
    """Elastic averaging with local steps that carry momentum.

        local step:     v <- δ v - γ g(x + δ v);   x <- x + v
        every τ steps:  e = α (x_i - c);   c <- c + e;   x_i <- x_i - e

    Settings: as in easgd. The momentum δ is the optimizer's: torch.optim.SGD(momentum=δ, nesterov=True) keeps
    the look-ahead point x + δ v as its weights, and so takes the same gradients.
    Late, lost and doubled messages: as in easgd.

    Example:
        >>> import freewheel as fw
        >>> result = fw.simulate(fw.EAMSGD(interval=4), workers=4, steps=40)

    Reference: Zhang, Choromanska, LeCun, "Deep learning with elastic averaging SGD", NeurIPS 2015.
    Differences: the elastic force acts on the look-ahead point.
    """

    name = "eamsgd"
    reference = "Zhang, Choromanska, LeCun, NeurIPS 2015 (momentum form)"
    convergence = "as easgd, with momentum; no rate known here"
    momentum = 0.9

    async def start(self, node: Node) -> None:
        if node.momentum <= 0:  # easgd under another name
            raise ConfigError("eamsgd needs an optimizer with momentum; give one (e.g. 0.9) or use easgd.")
        await super().start(node)
