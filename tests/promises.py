"""Bounds of the papers that no command shows: tests hold runs against them.

Arguments carry the papers' letters. Everything named ``adpsgd_…`` is in AD-PSGD's own units: there the
gradient of a batch is the SUM over its M samples, so gamma · M is what PyTorch calls the learning rate, and K
counts single gradients by single workers.

    n        workers                        sigma      std of one sample's gradient noise
    L        Lipschitz constant of ∇f       varsigma   std over workers of their own ∇f_i around ∇f
    M        samples in a batch             T          largest staleness, in steps k
    gamma    step size                      f0_gap     f(x0) - f*, or an upper bound of it
    K        steps                          rho        see `rho`
"""

# ruff: noqa: N803, N806 - the papers tell M from m and T from t, and so do we

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from freewheel.errors import ConfigError
from freewheel.topology import Topology


def rho(topology: Topology) -> float:
    """Second eigenvalue of E[WᵀW] when each step averages one random edge (AD-PSGD, assumption 3)."""
    # Averaging i and j is a projection, so WᵀW = W; its eigenvalues lie between 0 and 1.
    mean = np.eye(topology.size)
    for i, j in topology.edges:
        apart = np.zeros(topology.size)
        apart[[i, j]] = 1, -1
        mean -= np.outer(apart, apart) / (2 * len(topology.edges))
    return max(0.0, float(np.linalg.eigvalsh(mean)[-2])) if topology.edges else 0.0


def rho_bar(rho: float, n: int) -> float:
    """The consensus constant of AD-PSGD's theorems (Lian et al. 2018, supplement)."""
    _check_rho(rho)
    return (n - 1) / n * (1 / (1 - rho) + 2 * math.sqrt(rho) / (1 - math.sqrt(rho)) ** 2)


class ADPSGDConstants(NamedTuple):
    """C1, C2 and C3 of AD-PSGD's Theorem 1."""

    C1: float
    C2: float
    C3: float

    @property
    def hold(self) -> bool:
        """Whether Theorem 1 may be applied: C1 > 0, C2 >= 0 and C3 <= 1."""
        return self.C1 > 0 and self.C2 >= 0 and self.C3 <= 1


def adpsgd_constants(*, gamma: float, M: int, L: float, n: int, T: int, rho_bar: float) -> ADPSGDConstants:
    """The conditions under which Theorem 1 holds (AD-PSGD, Lian et al. 2018, supplement)."""
    spread = T * (n - 1) / n + rho_bar
    C1 = 1 - 24 * M**2 * L**2 * gamma**2 * spread
    if C1 <= 0:
        # Both others divide by C1: a negative one would turn their signs and make them look fulfilled.
        return ADPSGDConstants(C1, -math.inf, math.inf)
    C2 = (
        gamma * M / (2 * n)
        - gamma**2 * L * M**2 / n**2
        - 2 * M**3 * L**2 * T**2 * gamma**3 / n**3
        - (
            6 * gamma**2 * L**3 * M**2 / n**2
            + gamma * M * L**2 / n
            + 12 * M**3 * L**4 * T**2 * gamma**3 / n**3
        )
        * (4 * M**2 * gamma**2 * spread / C1)
    )
    C3 = (
        1 / 2
        + 2
        * (6 * gamma**2 * L**2 * M**2 + gamma * n * M * L + 12 * M**3 * L**3 * T**2 * gamma**3 / n)
        * (rho_bar / C1)
        + L * T**2 * gamma * M / n
    )
    return ADPSGDConstants(C1, C2, C3)


def adpsgd_step_bound(M: int, L: float, n: int, T: int, rho_bar: float) -> float:
    """U: a gamma at most this fulfils Theorem 1's conditions (AD-PSGD, Lian et al. 2018, supplement)."""
    _check_pair(n)
    smallest = min(
        1 / (8 * math.sqrt(3) * math.sqrt(T * (n - 1) / n + rho_bar)),
        n / (8 * T**2) if T else math.inf,
        1 / (32 * n * rho_bar),
        n / 10,
        _last_term(n, T, rho_bar),
    )
    return smallest / (M * L)


def adpsgd_theorem1(
    *, f0_gap: float, gamma: float, K: int, M: int, L: float, n: int, sigma: float, varsigma: float = 0.0
) -> float:
    """Bounds the mean over k of E‖∇f(mean of replicas)‖² (AD-PSGD, Theorem 1).

    Only where `adpsgd_constants` hold.
    """
    return 2 * f0_gap * n / (gamma * K * M) + 2 * gamma * L / n * _noise(M, sigma, varsigma)


def adpsgd_corollary2_gamma(
    *, K: int, M: int, L: float, n: int, sigma: float, varsigma: float = 0.0
) -> float:
    """The step size of AD-PSGD's Corollary 2."""
    return n / (10 * M * L + math.sqrt(_noise(M, sigma, varsigma)) * math.sqrt(K * M))


def adpsgd_corollary2_min_steps(
    *, M: int, L: float, n: int, T: int, rho_bar: float, sigma: float, varsigma: float = 0.0
) -> float:
    """The smallest K for which AD-PSGD's Corollary 2 speaks; beyond a few workers it is astronomic."""
    _check_pair(n)
    noise = _noise(M, sigma, varsigma)
    if noise == 0:
        return math.inf  # without noise gamma does not shrink with K, so no K is enough
    largest = max(
        192 * (T * (n - 1) / n + rho_bar),
        64 * T**4 / n**2,
        1024 * n**2 * rho_bar**2,
        1 / _last_term(n, T, rho_bar) ** 2,
    )
    return M * L**2 * n**2 / noise * largest


def adpsgd_corollary2_bound(
    *, f0_gap: float, K: int, M: int, L: float, sigma: float, varsigma: float = 0.0
) -> float:
    """Bounds what Theorem 1 bounds, at Corollary 2's gamma and K: no n in it, so speed-up is linear."""
    return 20 * f0_gap * L / K + 2 * (f0_gap + L) * math.sqrt(_noise(M, sigma, varsigma)) / math.sqrt(K * M)


def adpsgd_mixing_bound(n: int, rho: float, K: int) -> float:
    """Bounds E‖1/n - W_1 … W_K e_i‖², what K exchanges leave of a difference (AD-PSGD, Lemma 3).

    An equality on the complete graph.
    """
    _check_rho(rho)
    return (n - 1) / n * rho**K


def adpsgd_consensus_bound(
    *,
    gamma: float,
    M: int,
    L: float,
    n: int,
    T: int,
    rho_bar: float,
    sigma: float,
    varsigma: float = 0.0,
    mean_grad_sq: float,
) -> float:
    """Bounds the mean over k of the consensus distance mean_i ‖mean - x_i‖² (AD-PSGD, Lemma 7).

    ``mean_grad_sq`` is the mean over k of E‖Σ_i p_i ∇f_i(x_i)‖² at the models the gradients were taken at.
    """
    C1 = adpsgd_constants(gamma=gamma, M=M, L=L, n=n, T=T, rho_bar=rho_bar).C1
    if C1 <= 0:
        return math.inf  # gamma is too large for the lemma to say anything
    noise = 2 * gamma**2 * M * _noise(M, sigma, varsigma) * rho_bar
    signal = 4 * gamma**2 * M**2 * (T * (n - 1) / n + rho_bar) * mean_grad_sq
    return (noise + signal) / C1


def nodelay_discrepancy(L: float, tau: int, eta: float) -> float:
    """Bounds max ‖x_i - x_j‖ (Talyansky et al., ICLR 2019 submission); L bounds a gradient's norm."""
    return 2 * L * tau * eta


def nodelay_discrepancy_expected(eta: float, tau: int, s: float) -> float:
    """Bounds E‖x_i - x_j‖ after a few cycles, s the gradient noise's std (Talyansky et al.).

    Only where `nodelay_expected_holds`.
    """
    return 2 * eta * tau * s


def nodelay_expected_holds(eta: float, tau: int, H: float) -> bool:
    """Whether `nodelay_discrepancy_expected` applies: eta·beta·H <= 0.1, H the Lipschitz constant of ∇f."""
    return eta * (tau // 2) * H <= 0.1


def sasgd_drift(gamma: float, T: int, G: float) -> float:
    """Bounds ‖x_i - x_j‖ within an interval of T steps, gradient norms at most G (triangle inequality)."""
    return 2 * gamma * T * G


def dasgd_discrepancy(gamma: float, Q: float, S: float) -> float:
    """Bounds ‖x_i - x_j‖ when S gradients of norm at most Q were applied by only one of the two (DASGD)."""
    return gamma * Q * S


def dasgd_step_size(delta: float, L: float, sigma: float, Q: float, S_avg: float, K: int) -> float:
    """The gamma that gives the shape of DASGD's rate (Tosi & Theobald 2023); delta = f(x0) - f*.

    The paper's own constants were not at hand: use the shape (1/eps², 1/eps^1.5, 1/eps), not the value.
    """
    noise = delta / (L * sigma**2 * K) if sigma else math.inf
    stale = delta / (L**2 * Q**2 * S_avg**2 * K) if Q and S_avg else math.inf
    return min(1 / (2 * L), math.sqrt(noise), math.cbrt(stale))


def straggler_rate_sync(n: int, s: float) -> float:
    """Steps of all workers per compute time when everybody waits for one that is s times slower."""
    return n / s


def straggler_rate_async(n: int, s: float) -> float:
    """Steps of all workers per compute time when nobody waits and one is s times slower."""
    return n - 1 + 1 / s


def sync_speedup(n: int, step_alone_s: float, step_s: float) -> float:
    """Samples per second of n workers over those of one: n · t_iter(1)/t_iter(n)."""
    return n * step_alone_s / step_s


def _noise(M: int, sigma: float, varsigma: float) -> float:
    return sigma**2 + 6 * M * varsigma**2


def _last_term(n: int, T: int, rho_bar: float) -> float:
    """The last term of U; Corollary 2's last term is one over its square."""
    top = math.pow(n, 1 / 12) * math.pow(n - 1, -1 / 4)
    stale = 8 * math.sqrt(6) * math.pow(T, 2 / 3) + 8
    return top / (stale * math.cbrt(T + rho_bar * n / (n - 1)))


def _check_rho(rho: float) -> None:
    if not 0 <= rho < 1:
        raise ConfigError(f"rho must be at least 0 and below 1, not {rho}: at 1 the workers never mix.")


def _check_pair(n: int) -> None:
    if n < 2:
        raise ConfigError(f"AD-PSGD's bounds are about two or more workers, not {n}.")
