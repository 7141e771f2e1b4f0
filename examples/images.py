"""Small images, as PyTorch scripts do it. Without the four lines marked "Freewheel" it is a plain script.

python examples/images.py
freewheel run -n 3 examples/images.py --epochs 3
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import freewheel as fw  # Freewheel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(32 * 3 * 3, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return F.log_softmax(self.fc(self.dropout(torch.flatten(x, 1))), dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch % args.log_interval == 0:
            seen, count = batch * len(data), len(train_loader.dataset)
            share = 100.0 * batch / len(train_loader)
            print(f"epoch {epoch} [{seen}/{count} ({share:.0f} %)] loss {loss.item():.4f}")


def test(model, device, test_loader):
    model.eval()
    loss = correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            loss += F.nll_loss(output, target, reduction="sum").item()
            correct += (output.argmax(dim=1) == target).sum().item()
    count = len(test_loader.dataset)
    print(f"test set: loss {loss / count:.4f}, accuracy {correct}/{count} ({100.0 * correct / count:.1f} %)")


def main():
    parser = argparse.ArgumentParser(description="Handwritten digits of 8×8 pixels")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--test-batch-size", type=int, default=360)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train_set = TensorDataset(images[:1437], labels[:1437])
    test_set = TensorDataset(images[1437:], labels[1437:])
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=args.test_batch_size)

    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    worker = fw.attach(model, optimizer, "adpsgd").start()  # Freewheel
    train_loader = worker.loader(train_loader, epochs=args.epochs)  # Freewheel

    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()

    model = worker.finish()  # Freewheel
    test(model, device, test_loader)


if __name__ == "__main__":
    main()
