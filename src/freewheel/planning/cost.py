"""What a strategy costs in convergence: how many worker-steps it needs for one of synchronous SGD.

    steps needed = noise + S·(LAG·lag + DRIFT·n·drift²)

Lag, in steps of all workers: how far the model a gradient is taken at is behind. The rate of asynchronous SGD
is σ²/ε² + τ/ε (Koloskova et al. 2022): a delay costs by the learning rate times the largest curvature, LAG.
Drift, in lengths of one update: how far a worker is from the mean of all. A step of the mean loses L² times
its square (the M_k of AD-PSGD's Theorem 1 and Lemma 7) against a gradient whose noise n workers have made √n
times smaller; drift goes in all directions, so what counts is the learning rate times the mean curvature,
whose square DRIFT is. Noise: what is left in the answer, against the mean of all gradients; 1 where all
updates are averaged or added up. All three are measured on the stand-in model (`probe.py`).

The two constants depend on the task, and nobody knows them before training. They are set to what `digits`
(cnn, 8 workers) shows in the simulator: docs/PLAN.md has the figures. S is the caller's "more than that".
"""

from __future__ import annotations

LAG = 0.3
DRIFT = 4e-4


def steps_needed(workers: int, drift: float, lag: float, noise: float, sensitivity: float) -> float:
    """Worker-steps for one of synchronous SGD; 1 or more."""
    return max(1.0, noise) + sensitivity * (LAG * max(0.0, lag) + DRIFT * workers * drift**2)


WHY = {
    "allreduce": "nothing: one model, a step is a batch of all workers (textbook)",
    "sasgd": "workers part by at most 2γTG between merges (triangle inequality)",
    "hierarchical_sasgd": "workers part by at most 2γ·k·T1·G (triangle inequality)",
    "nodelay": "discrepancy at most 2Lτη, however many workers (Talyansky et al. 2019)",
    "nodelay_free": "as nodelay, τ what the network allows: unbounded unless tau is set",
    "adpsgd": "the rate of SGD once training is long (Lian et al. 2018, Corollary 2)",
    "dpsgd": "equal at few workers, worse at 32 (Assran et al. 2019, Table 1)",
    "dasgd": "σ/ε² + QS/ε^1.5 + S/ε: grows with staleness S (Tosi, Theobald 2023)",
    "asgd": "each gradient n-1 updates late: σ²/ε² + τ/ε (Koloskova et al. 2022)",
    "downpour": "as asgd, with larger and later updates; no rate known here",
    "easgd": "stable for small α (Zhang et al. 2015); no rate known here",
    "eamsgd": "as easgd, with momentum; no rate known here",
    "leader": "follows one worker, so noise is averaged less; no rate known here",
    "grouping": "late by groups, not by workers (CCGrid 2019); no rate known here",
    "none": "workers never agree: how fast they are alone, not a choice",
}
"""What theory says, and whose; where it says nothing, that."""


def why(name: str) -> str:
    """The phrase for a strategy; one that is not ours gets none."""
    return WHY.get(name, "not known here")
