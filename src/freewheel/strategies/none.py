"""No communication: the control that every other strategy is measured against."""

from dataclasses import dataclass

from freewheel.strategy import Machines, Strategy


@dataclass
class NoCommunication(Strategy):
    """Every worker trains alone; the answer is the mean of what they reach.

        x_i <- x_i + u_i

    Late, lost and doubled messages: there are none.

    Example:
        >>> import freewheel as fw
        >>> fw.simulate("none", workers=2, steps=20).bytes_per_step
        0.0

    Reference: none; the upper limit of speed and the lower limit of agreement.
    """

    name = "none"
    reference = "the control: no communication at all"
    convergence = "workers never agree: how fast they are alone, not a choice"
    keeps_vectors = 0
    keeps_mean = True

    @classmethod
    def round_s(cls, machines: Machines) -> float:
        return 0.0
