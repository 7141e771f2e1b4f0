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
