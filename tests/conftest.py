import hypothesis
import torch

# Two test processes with two threads each get in each other's way on a machine with two cores.
torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "freewheel", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("freewheel")
