"""The papers' bounds as functions, to compare a run with what was promised.

Arguments carry the papers' letters. Times are in seconds (``_s``), sizes in bytes.
"""

# ruff: noqa: N803 - the papers tell M from m and T from t, and so do we

import math
from collections.abc import Sequence

from freewheel.errors import ConfigError
from freewheel.topology import Topology


def rho_mixing(topology: Topology) -> float:
    """max(|λ2|, |λn|)² of the mixing matrix, per step of its cycle (D-PSGD, Lian et al. 2017)."""
    return (1 - topology.spectral_gap) ** 2


def nodelay_min_tau(t_merge_s: float, t_grad_s: float) -> int:
    """The smallest even tau at which nobody waits for a merge (Talyansky et al.): 2 t_merge/t_grad."""
    if t_merge_s < 0 or t_grad_s <= 0:
        raise ConfigError(
            f"a merge of {t_merge_s} s and gradients of {t_grad_s} s make no cycle. "
            "Give a merge of 0 s or more and a gradient above 0 s."
        )
    # Rounding in the ratio (1.1/0.1 > 11) must not cost a whole step.
    return 2 * max(1, math.ceil(t_merge_s / t_grad_s - 1e-9))


def nodelay_idle_share(tau: int, t_merge_s: float, t_grad_s: float) -> float:
    """Share of the time a worker waits for merges: a cycle is beta = tau/2 gradients beside one merge."""
    if tau < 2 or tau % 2:
        raise ConfigError(
            f"tau must be an even number of steps, 2 or more, not {tau}: a cycle is tau/2 steps."
        )
    busy_s = tau // 2 * t_grad_s
    idle_s = max(0.0, t_merge_s - busy_s)
    return idle_s / (busy_s + idle_s)


def sasgd_step_s(t_grad_s: float, t_allreduce_s: float, T: int) -> float:
    """Seconds per step when one blocking all-reduce is shared by T steps (SASGD, Cong et al. 2017)."""
    return t_grad_s + t_allreduce_s / T


def asgd_mean_delay(n: int) -> int:
    """Mean gradient delay at a parameter server with n workers that never idle, whatever their speeds."""
    return n - 1


def easgd_alpha_limit(eta: float) -> float:
    """The largest alpha at which round-robin EASGD on x²/2 is stable for every n (Zhang et al. 2015)."""
    if not 0 <= eta <= 2:
        raise ConfigError(f"eta must lie between 0 and 2, not {eta}: beyond, no alpha is stable.")
    return (4 - 2 * eta) / (4 - eta)


def ring_allreduce_s(n: int, size_bytes: float, latency_s: float, bytes_per_s: float) -> float:
    """Seconds for a ring all-reduce over n workers (alpha-beta model): 2(n-1) hops of 1/n of the bytes."""
    return 2 * (n - 1) * (latency_s + size_bytes / n / bytes_per_s)


def sync_step_s(
    t_f_s: float,
    t_b_s: Sequence[float],
    t_c_s: Sequence[float],
    *,
    t_io_s: float = 0.0,
    t_h2d_s: float = 0.0,
    t_u_s: float = 0.0,
    overlap: bool = True,
) -> float:
    """Seconds per synchronous step: the DAG model of S-SGD (after Shi et al. 2018).

    Forward, backward and all-reduce times (the latter two per layer, first layer first), reading, copying to
    the device and updating. With ``overlap`` the next batch is read meanwhile, and a layer's gradient is sent
    while the layers below it still go backward; without, one thing follows another.
    """
    if len(t_b_s) != len(t_c_s):
        raise ConfigError(
            f"{len(t_b_s)} backward times but {len(t_c_s)} communication times. Give one of each per layer."
        )
    if not overlap:
        return t_io_s + t_h2d_s + t_f_s + sum(t_b_s) + sum(t_c_s) + t_u_s
    end_b = end_c = 0.0  # since the start of the backward pass
    for t_b, t_c in zip(reversed(t_b_s), reversed(t_c_s), strict=True):
        end_b += t_b
        end_c = max(end_c, end_b) + t_c  # the link is free again, and the gradient is there
    return max(t_io_s + t_h2d_s, t_f_s + end_c + t_u_s)
