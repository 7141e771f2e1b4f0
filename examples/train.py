"""Handwritten digits with Freewheel: alone, or as several workers.

python examples/train.py
freewheel run -n 4 examples/train.py
torchrun --nproc-per-node 4 examples/train.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import freewheel as fw

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
training = TensorDataset(images[:1437], labels[:1437])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
criterion = nn.CrossEntropyLoss()

with fw.attach(model, optimizer, "adpsgd") as worker:
    loader = worker.loader(training, batch_size=32)
    for _ in range(20):  # passes over the data
        for inputs, targets in loader:
            loss = criterion(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            worker.report(loss)

model = worker.consensus().eval()
if worker.rank == 0:
    hits = (model(images[1437:]).argmax(1) == labels[1437:]).float().mean()
    print(f"workers: {worker.world_size}, accuracy on images they have not seen: {hits:.1%}")
