"""The nets of the larger tasks: ResNet-20 and a small VGG for images, a small GPT for text."""

import itertools

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    """A 3×3 convolution with He's weights; BatchNorm follows, so there is no bias."""
    layer = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layer


def normalised(inputs: int, outputs: int) -> list[nn.Module]:
    return [convolution(inputs, outputs), nn.BatchNorm2d(outputs), nn.ReLU()]


def classifier(inputs: int) -> list[nn.Module]:
    """No ReLU follows the linear layer, so it keeps torch's smaller initial weights."""
    layer = nn.Linear(inputs, 10)
    nn.init.zeros_(layer.bias)
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), layer]


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut that has no weights (option A of the paper).

    Where the image shrinks, the shortcut takes every second pixel and fills the new channels with zeros.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.first_norm = convolution(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.second, self.second_norm = convolution(outputs, outputs), nn.BatchNorm2d(outputs)
        self.stride, self.extra = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.first_norm(self.first(x)))
        out = self.second_norm(self.second(out))
        if self.stride != 1 or self.extra:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))
        return F.relu(out + x)


def resnet20() -> nn.Module:
    """ResNet-20 for 32×32 images: 6·3 + 2 = 20 layers with weights, 0.27 million of them.

    Reference: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2.
    """
    layers = normalised(3, 16)
    for inputs, outputs in itertools.pairwise([16] * 4 + [32] * 3 + [64] * 3):
        layers.append(BasicBlock(inputs, outputs, stride=1 if inputs == outputs else 2))
    return nn.Sequential(*layers, *classifier(64))


def vgg() -> nn.Module:
    """A small VGG with BatchNorm: three blocks of two convolutions, 1.15 million weights."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 64), (64, 128), (128, 256)):
        layers += [*normalised(inputs, outputs), *normalised(outputs, outputs), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, *classifier(256))


class TransformerBlock(nn.Module):
    """Attention to what came before, then a small net for each character; each normalises first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        windows, length, width = x.shape
        parts = self.queries_keys_values(self.attention_norm(x))
        parts = parts.view(windows, length, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(windows, length, width))
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return out


class GPT(nn.Module):
    """A small GPT: learned positions, and one matrix for the characters read and those guessed (tied)."""

    def __init__(self, characters: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.guess = nn.Linear(width, characters, bias=False)
        self.guess.weight = self.characters.weight
        for name, parameter in self.named_parameters():  # GPT-2's initial weights
            if parameter.dim() == 2:  # layers that add to the residual stream start smaller
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if "_out" in name else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits of the next character at each place of windows × characters."""
        x = self.characters(characters) + self.positions.weight[: characters.shape[1]]
        guesses: Tensor = self.guess(self.norm(self.blocks(x)))
        return guesses
